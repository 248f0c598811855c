"""Best-first search: the fastest plans that fit, with proof, on one device or on many.

A queue holds groups of plans by what none of them is faster than. The group with the lowest bound
is looked at more closely, which raises its bounds or divides it, until it is a single plan; that
one's program says whether it fits. When the first in the queue is slower than what was found,
nothing unpriced can be faster.

    products -> passes -> stages -> sharing -> memory -> step -> one plan

The clock's bytes are never above the program's. So a plan that its program finds too large goes
back into the queue with the recompute that its program asks for.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from operator import itemgetter
from typing import Literal, get_args

import numpy as np

from windlass.cost import (
    ArrayClock,
    Bools,
    Floats,
    Ints,
    PlanColumns,
    compile_shares,
    layer_kinds_compiled,
)  # fmt: skip
from windlass.planner.result import EvaluatedPlan
from windlass.planner.search.bounds import ConfigBounds
from windlass.planner.search.config_prices import CLOCK_ERROR
from windlass.planner.search.evaluate import evaluate, stage_peak_bytes
from windlass.planner.search.least_recompute import fits_tiers, most_sharing
from windlass.planner.search.memory_fit import MemoryFit
from windlass.planner.search.search_result import SearchResult, run_rank
from windlass.planner.space.plan_space import PipelineOption, PlanSpace
from windlass.schema import Plan

_EQUAL = 1e-9
"""Relative rounding error between steps that take equally long."""

_SPLIT_FACTOR = {
    "products": 1.3,
    "passes": 1.03,
    "stages": 1.03,
    "sharing": 1.02,
    "memory": 1.02,
    "step": 1.0,
}
"""Factor by which plans may be slower than the fastest of a group and still be examined with it.

With a smaller factor too much is done one by one, with a larger one too much that a better plan
would rule out.
"""


_Level = Literal["products", "passes", "stages", "sharing", "memory", "step"]
_LEVELS: tuple[_Level, ...] = get_args(_Level)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Plans with what none of them is faster than."""

    level: _Level
    """How much the bounds take into account."""
    bounds: Floats
    """Seconds of a step that each item takes at least, `[item]`."""
    items: Ints
    """Configurations, or rows of the columns, `[item]`."""
    pipelines: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Number of stages of each configuration, `[item]`, where they differ."""
    option: PipelineOption | None = None
    columns: PlanColumns | None = None
    settled: bool = False
    """Whether the recompute is what the plan's program asks for."""

    def split(self, limit: float) -> "tuple[_Group, _Group]":
        """The items to examine next, and the slower ones."""
        reach = min(limit, float(self.bounds.min()) * _SPLIT_FACTOR.get(self.level, 1.0))
        near = self.bounds <= reach
        if self.level == "step":
            near = np.arange(len(near)) == self.bounds.argmin()
        return self.select(near), self.select(~near)

    def select(self, items: Bools) -> "_Group":
        """Some of the items."""
        pipelines = self.pipelines[items] if self.pipelines.size else self.pipelines
        return replace(
            self, bounds=self.bounds[items], items=self.items[items], pipelines=pipelines
        )


_MOST_SMALLEST = 24
"""Configurations with too much state that are looked at if nothing fits."""


class BestFirst:
    """Searches a plan space.

    Args:
        space: the plan space.
        budget_bytes: device memory budget.
        bounds: those of this space and budget; None makes new ones.
    """

    def __init__(
        self, space: PlanSpace, budget_bytes: int, bounds: ConfigBounds | None = None
    ) -> None:
        self.space, self._budget_bytes = space, budget_bytes
        if bounds is None:
            clock = ArrayClock(space.base, space.graph, space.machine)
            bounds = ConfigBounds(space, clock, budget_bytes)
        self.bounds = bounds
        """Lower bounds on all configurations."""
        self.clock = bounds.clock
        self._fit = MemoryFit(space, self.clock, budget_bytes)
        self._queue: list[tuple[float, int, _Group]] = []
        self._pushed, self._limit = count(), inf
        self._too_large: list[tuple[Floats, _Group]] = []
        """Configurations whose state alone is too large, with its bytes."""
        self._too_full: list[_Group] = []
        """Configurations that do not fit even if all layers are recomputed."""

    def search(
        self, most: int = 1, *, within: float = 0.0, below_seconds: float = inf
    ) -> SearchResult:
        """The fastest plans that fit.

        Args:
            most: plans that are wanted; with one, the first found and proved ends the search.
            within: share by which plans may be slower than the fastest and still be looked for.
            below_seconds: seconds of a step of a plan that is known; no slower one is looked for.
        """
        result = SearchResult()
        everything = np.arange(self.space.table.count)
        pipelines = np.array(self.space.pipeline_degrees)
        bounds = self.bounds.products(pipelines)
        stages, config = np.nonzero(np.isfinite(bounds))
        self._push(
            _Group(
                level="products",
                bounds=bounds[stages, config],
                items=everything[config],
                pipelines=pipelines[stages],
            )
        )
        self._limit = below_seconds
        while self._queue and self._queue[0][0] <= self._limit:
            knows_plan = bool(result.fitting) or self._limit < inf
            first, rest = self._next(knows_plan=knows_plan).split(self._limit)
            self._push(rest)
            for group in self._levels[first.level](first, result):
                self._push(group.select((group.bounds <= self._limit) & (group.bounds < inf)))
            if len(result.fitting) >= most:
                result.fitting.sort(key=itemgetter(0))
                slowest = result.fitting[most - 1][0] * (1 + within + _EQUAL)
                self._limit = min(self._limit, slowest)
        result.best = self._evaluated(result.fitting, most)
        return result

    def look_at_smallest(self, result: SearchResult) -> None:
        """Adds the smallest plans of configurations that were dropped before they were plans."""
        for group in self._too_full:
            list(self._with_most_sharing(group, result))
        if not self._too_large:
            return
        held = np.concatenate([each for each, _ in self._too_large])
        most = np.partition(held, min(_MOST_SMALLEST, len(held)) - 1)[:_MOST_SMALLEST].max()
        pins = self.space.request.parallel
        several = (pins.virtual_stages or 1) > 1
        schedule = pins.schedule or ("interleaved" if several else "1f1b")
        for nbytes, group in self._too_large:
            for stages in self._by_stages(group.select(nbytes <= most), result):
                if stages.option is not None and stages.option.schedule == schedule:
                    list(self._with_most_sharing(stages, result))

    def _next(self, *, knows_plan: bool) -> _Group:
        """The group with the lowest bound; until a plan is known, of those closest to a plan."""
        if knows_plan:
            return heappop(self._queue)[2]
        at = min(
            range(len(self._queue)),
            key=lambda at: (-_LEVELS.index(self._queue[at][2].level), self._queue[at][:2]),
        )
        group = self._queue[at][2]
        self._queue[at] = self._queue[-1]
        self._queue.pop()
        heapify(self._queue)
        return group

    def _push(self, group: _Group) -> None:
        if group.items.size:
            heappush(self._queue, (float(group.bounds.min()), next(self._pushed), group))

    @cached_property
    def _levels(self) -> dict[str, Callable[[_Group, SearchResult], Iterator[_Group]]]:
        return {
            "products": self._by_passes,
            "passes": self._by_stages,
            "stages": self._with_most_sharing,
            "sharing": self._in_memory,
            "memory": self._by_step,
            "step": self._of_program,
        }

    def _by_passes(self, group: _Group, _: SearchResult) -> Iterator[_Group]:
        held = self.bounds.state_bytes(group.pipelines, group.items)
        over = held > self._budget_bytes
        if over.any():
            self._too_large.append((held[over], group.select(over)))
            group = group.select(~over)
        if group.items.size:
            seconds = self.bounds.passes(group.pipelines, group.items) * (1 - CLOCK_ERROR)
            yield replace(group, level="passes", bounds=np.maximum(group.bounds, seconds))

    def _by_stages(self, whole: _Group, _: SearchResult) -> Iterator[_Group]:
        """The configurations under each schedule of each number of stages."""
        for pipeline in np.unique(whole.pipelines).tolist():
            configs = whole.items[whole.pipelines == pipeline]
            for option in self.space.options(pipeline):
                legal = self.space.legal(option, configs)
                if legal.size:
                    seconds = self.bounds.stages(option, legal, self._limit) * (1 - CLOCK_ERROR)
                    group = _Group(level="stages", bounds=seconds, items=legal, option=option)
                    if np.isinf(seconds).any():
                        self._too_full.append(group.select(np.isinf(seconds)))
                    yield group

    def _with_most_sharing(self, group: _Group, result: SearchResult) -> Iterator[_Group]:
        """The configurations with the recompute that they need even if replicas share all state."""
        least = dict.fromkeys(group.items.tolist(), inf)
        for _, config, bounds in self._bounded_in_memory(group, result, only_most=True):
            for item, bound in zip(config.tolist(), bounds.tolist(), strict=True):
                least[item] = min(least[item], bound)
        bounds = np.array(list(least.values()))
        if group.option is not None:
            self.bounds.drop(group.option, group.items[bounds == inf])
        yield replace(group, level="sharing", bounds=bounds)

    def _in_memory(self, group: _Group, result: SearchResult) -> Iterator[_Group]:
        """All plans of some configurations, with the recompute that they need to fit."""
        for plans, _, bounds in self._bounded_in_memory(group, result, only_most=False):
            yield _Group(level="memory", bounds=bounds, items=np.arange(plans.count), columns=plans)

    def _bounded_in_memory(
        self, group: _Group, result: SearchResult, *, only_most: bool
    ) -> Iterator[tuple[PlanColumns, Ints, Floats]]:
        """Plans that fit by the clock's bytes, their configurations and bounds on their steps."""
        option = group.option
        if option is None:
            return
        known = dict(zip(group.items.tolist(), group.bounds.tolist(), strict=True))
        for columns, config in self.space.columns(option, group.items):
            kept = self._fit.tiers_hold(columns)
            if only_most:
                kept &= most_sharing(columns, config)
            held = np.flatnonzero(kept)
            for plans, rows in self._fit.recomputed(columns.select(held), option, result):
                own = config[held[rows]]
                bounds = np.array([known[each] for each in own.tolist()])
                seconds = self.clock.least_seconds(plans) * (1 - CLOCK_ERROR)
                yield plans, own, np.maximum(bounds, seconds)

    def _by_step(self, group: _Group, result: SearchResult) -> Iterator[_Group]:
        """The plans with the clock's own seconds of their steps."""
        if group.columns is None:
            return
        columns = group.columns.select(group.items)
        seconds = self._step_seconds(columns)
        result.priced += columns.count
        result.keep_near(columns, seconds)
        yield _Group(
            level="step",
            bounds=seconds,
            items=np.arange(columns.count),
            columns=columns,
        )

    def _of_program(self, group: _Group, result: SearchResult) -> Iterator[_Group]:
        """Settles one plan: it fits by its program, needs more recompute, or does not fit."""
        if group.columns is None:
            return
        row = int(group.items[0])
        plan = self.space.plan(group.columns, row)
        if max(stage_peak_bytes(plan, self.space.graph, self.space.machine)) <= self._budget_bytes:
            if not plan.offloads or fits_tiers(plan, self.space):
                result.fitting.append((float(group.bounds[0]), plan))
            return
        if group.settled or not self.space.minimizes_recompute:
            return
        one = group.columns.select(np.array([row]))
        least = self._fit.recomputed_by_program(one)
        if least.fits.any():
            seconds = self._step_seconds(least.columns)
            yield _Group(
                level="step",
                bounds=seconds,
                items=np.zeros(1, dtype=np.int64),
                columns=least.columns,
                settled=True,
            )

    def _evaluated(self, fitting: Sequence[tuple[float, Plan]], most: int) -> list[EvaluatedPlan]:
        """The fastest plans, and those as fast as the last of them, with their predictions."""
        budget_bytes, kept = self._budget_bytes, self.space.kept_code
        slowest = fitting[:most][-1][0] * (1 + _EQUAL) if fitting else inf
        plans = [plan for seconds, plan in fitting if seconds <= slowest]
        best = [
            (plan, evaluate(plan, self.clock, budget_bytes=budget_bytes, kept_code=kept))
            for plan in plans
        ]
        return sorted(best, key=lambda item: run_rank(item, self.space.request.train.steps))

    def _step_seconds(self, columns: PlanColumns) -> Floats:
        """Seconds of a step with its share of the compilation before the first, `[plan]`."""
        space = self.space
        compiling = compile_shares(columns, space.sequence, space.kept_code)
        seconds = layer_kinds_compiled(space.graph) * space.machine.device.compile_seconds
        shares = compiling * seconds / space.request.train.steps
        return np.asarray(self.clock.step_seconds(columns) + shares)
