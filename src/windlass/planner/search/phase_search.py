"""Searches plans in phases, for models that do not fit in device memory at once.

Few of the many plans in phases are simulated, always the one that may still be the fastest. Bounds,
each tighter and dearer than the one before, show that a plan does not fit or is slower than a known
one:

- sizes of layers, and seconds of their passes (`phase_bounds`);
- a program of 4 micro-batches. What a stage holds at an instruction grows by a constant with every
  further one, so that it gives the peak of the full plan;
- programs of 3 and 4. The end of a step is the largest of sums that each grow by a constant with
  every micro-batch, so a line through the ends of the two is never above the full plan's.
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from windlass.cost import ArrayClock, Floats
from windlass.planner.result import EvaluatedPlan, with_budget
from windlass.planner.search.bounds import ConfigBounds
from windlass.planner.search.config_prices import CLOCK_ERROR
from windlass.planner.search.phase_bounds import (
    LayerPasses,
    LayerState,
    PhaseMemory,
    PhasePrices,
    chunked_seconds,
    min_step_seconds,
)
from windlass.planner.search.truncated_plan import TruncatedPlan
from windlass.planner.space.options import offload_tiers
from windlass.planner.space.phase_space import (
    MOST_SPANNING,
    OffloadedState,
    names_pipeline,
    passes_key,
    plans_of,
    state_key,
    with_state_on,
)
from windlass.planner.space.phase_table import PhaseTable, with_chunks
from windlass.planner.space.plan_space import PlanSpace
from windlass.program import plan_errors
from windlass.schema import Plan, Tier


class PhaseSearchResult(NamedTuple):
    """Plans in phases that were found."""

    best: tuple[EvaluatedPlan, ...]
    """Plans that fit, as far as needed, the fastest run first."""
    evaluated: int
    """Number of plans that bounds or the simulator evaluated."""


def may_fit_in_phases(space: PlanSpace, budget_bytes: int) -> bool:
    """Whether some plan in phases may fit, as far as short programs tell."""
    clock = ArrayClock(space.base, space.graph, space.machine)
    bounds, search = (
        ConfigBounds(space, clock, budget_bytes),
        PhaseSearch(space, PhasePrices(clock)),
    )
    return next(search.fitting(budget_bytes, bounds, inf), None) is not None


class _Shape(NamedTuple):
    """All plans in phases of one configuration on so many stages."""

    pipeline: int
    config: int
    spans: bool
    """Whether phases span all stages: each is a model chunk."""


class PhaseSearch:
    """A queue of plans in phases by what none of them is faster than.

    A search under another budget knows all plans that one before has looked at.

    Args:
        space: what is open; `request.phases` pins the phases of a stage.
        prices: of plans of the same model and machine.
    """

    def __init__(self, space: PlanSpace, prices: PhasePrices) -> None:
        self._space, self._state = space, OffloadedState(space)
        self._sizes = PhaseSizes(space, self._state)
        self._prices = prices
        self._bases: dict[_Shape, tuple[Plan, ...]] = {}
        self._seconds: dict[tuple[_Shape, int], Floats] = {}
        self._orders: dict[Plan, float] = {}
        self._short: dict[Plan, TruncatedPlan] = {}
        self.best_seconds = inf
        """Seconds of a step of the fastest known plan; set it when one is found."""
        self.examined = 0
        """Plans that fit by the sizes of their layers."""

    def search(
        self, budget_bytes: int, bounds: ConfigBounds, *, below_seconds: float = inf
    ) -> PhaseSearchResult:
        """The fastest plan in phases that fits, of all of `phase_space`.

        Args:
            budget_bytes: device memory budget.
            bounds: what no configuration of the space is faster than.
            below_seconds: seconds of a step of the fastest known plan, with its share of the
                compilation; plans that cannot be faster are not examined.
        """
        steps = self._space.request.train.steps
        evaluated: list[tuple[float, int, EvaluatedPlan]] = []
        for short in self.fitting(budget_bytes, bounds, below_seconds):
            prediction = with_budget(short.prediction, budget_bytes)
            seconds = prediction.step_seconds + prediction.compile_seconds / steps
            evaluated.append((seconds, len(evaluated), (short.plan, prediction)))
            self.best_seconds = min(self.best_seconds, seconds)
        found = sorted(evaluated, key=itemgetter(0, 1))
        return PhaseSearchResult(tuple(each for _, _, each in found), self.examined)

    def fitting(
        self, budget_bytes: int, bounds: ConfigBounds, below_seconds: float
    ) -> Iterator[TruncatedPlan]:
        """Plans that fit by their programs and may be faster than any before, quickest bound first.

        Args:
            budget_bytes: device memory budget.
            bounds: what no configuration of the space is faster than.
            below_seconds: seconds of a step that is known; no slower plan is looked for.
        """
        self._budget_bytes, self._bounds = budget_bytes, bounds
        self.best_seconds, self.examined, order = below_seconds, 0, count()
        waiting: list[tuple[float, int, _Shape | Plan | TruncatedPlan]]
        waiting = [
            (seconds, next(order), shape)
            for spans in (False, True)
            for seconds, shape in self._shapes(spans=spans)
        ]
        heapify(waiting)
        while waiting and waiting[0][0] < self.best_seconds:
            bound, _, item = heappop(waiting)
            if isinstance(item, TruncatedPlan):
                yield item
            elif isinstance(item, _Shape):
                for seconds, plan in self._fitting_by_size(item):
                    self.examined += 1
                    if seconds < self.best_seconds:
                        heappush(waiting, (seconds, next(order), plan))
            elif (closer := self._chunked(item)) > bound:
                heappush(waiting, (closer, next(order), item))
            elif (short := next(self._with_offload_tiers(item), None)) is not None:
                seconds = bound if short.spans_stages else short.step_seconds
                heappush(waiting, (seconds, next(order), short))

    def _chunked(self, plan: Plan) -> float:
        """Seconds that a plan whose phases span stages takes at least; 0 of others."""
        if plan.parallel.virtual_stages == 1:
            return 0.0
        if plan not in self._orders:
            seconds = chunked_seconds(plan, self._bounds.clock)
            self._orders[plan] = seconds * (1 - CLOCK_ERROR)
        return self._orders[plan]

    def _shapes(self, *, spans: bool) -> Iterator[tuple[float, _Shape]]:
        """Configurations on each number of stages, with seconds that no plan of them is below."""
        space = self._space
        if not offload_tiers(space.machine):
            return
        pipelines = np.array(
            [each for each in space.pipeline_degrees if each <= space.graph.layers]
        )
        near = self._bounds.products(pipelines) < self.best_seconds
        if spans and not names_pipeline(space.request):
            near[:, space.table.accumulation > MOST_SPANNING] = False
        configs = np.flatnonzero(near.any(axis=0))
        near[:, configs] &= self._bounds.holds_layers(configs) if configs.size else True
        stage, config = np.nonzero(near)
        if config.size:
            stages = pipelines[stage]
            seconds = self._bounds.in_phases(stages, config, self.best_seconds, spans=spans)
            seconds *= 1 - CLOCK_ERROR
            for at in np.flatnonzero(seconds < self.best_seconds).tolist():
                yield float(seconds[at]), _Shape(int(stages[at]), int(config[at]), spans)

    def _fitting_by_size(self, shape: _Shape) -> Iterator[tuple[float, Plan]]:
        """Plans that fit by layer sizes alone and may be fastest, with bounds on their steps."""
        graph, machine = self._space.graph, self._space.machine
        nearest, bounds = offload_tiers(machine)[0].name, self._bounds
        passes = bounds.phase_stages(shape.pipeline, np.array([shape.config]))[1][0]
        even, whole = bounds.spanning_passes(shape.pipeline, np.array([shape.config]))[:, 0]
        begins = np.array(self._space.chunk_bounds(shape.pipeline))
        _, turns = bounds.turns(shape.pipeline)
        if shape not in self._bases:
            self._bases[shape] = tuple(
                plan
                for plan in plans_of(self._space, shape.pipeline, shape.config)
                if (plan.parallel.schedule == "interleaved") == shape.spans
            )
        for index, base in enumerate(self._bases[shape]):
            offloaded = with_state_on(base, nearest, activations=False)
            once, again, alone = self._prices.exchanges(offloaded)
            if shape.spans:
                least = max(even + once[-1] / shape.pipeline, whole)
            else:
                busy = passes + np.diff(once[begins]) + again[turns] - again[begins[:-1]]
                least = max(busy.max(), np.diff(alone[begins]).max())
            if least * (1 - CLOCK_ERROR) >= self.best_seconds:
                continue
            if self._sizes.least_bytes(base) > self._budget_bytes:
                continue
            table = self._state.table_with_room(base)
            if table is None:
                continue
            plan, key = with_chunks(offloaded, table.stages[0]), (shape, index)
            if key not in self._seconds:
                self._seconds[key] = min_step_seconds(plan, table, self._prices)
            seconds = self._seconds[key]
            near = np.flatnonzero(seconds < self.best_seconds).tolist()
            places = self._sizes.places(base, table, self._budget_bytes) if near else []
            rows = [row for row in near if places[row]]
            if rows and not plan_errors(plan, graph, machine):
                for row in rows:
                    yield float(seconds[row]), with_chunks(offloaded, table.stages[row])

    def _with_offload_tiers(self, plan: Plan) -> Iterator[TruncatedPlan]:
        """The plan offloaded to the nearest tier that holds it, if it fits.

        Activations stay on the device if there is room: a transfer that is not needed delays
        nothing.
        """
        graph, machine = self._space.graph, self._space.machine
        table = PhaseTable.of(plan, (plan.stages,), graph)
        for tier, activations in self._sizes.places(plan, table, self._budget_bytes)[0]:
            offloaded, outputs = with_state_on(plan, tier.name, activations=activations), None
            if activations:
                nbytes = self._sizes.memory(plan).offloaded_outputs(table)
                both_ways = tier.transfer_seconds(1, 0) + tier.transfer_seconds(0, 1)
                outputs = np.asarray(nbytes * both_ways, dtype=np.float64)
            if min_step_seconds(offloaded, table, self._prices, outputs)[0] >= self.best_seconds:
                continue
            short = self._short.setdefault(offloaded, TruncatedPlan(offloaded, self._prices))
            if (
                not plan_errors(offloaded, graph, machine)
                and short.least_peak_bytes <= self._budget_bytes
                and short.peak_bytes <= self._budget_bytes
            ):
                yield short


class PhaseSizes:
    """What fits by layer sizes alone.

    Args:
        space: the plan space.
        state: bytes of state in offload tiers.
    """

    def __init__(self, space: PlanSpace, state: OffloadedState) -> None:
        self._space, self._state = space, state
        self._layer_state: dict[tuple[object, ...], LayerState] = {}
        self._layer_passes: dict[tuple[object, ...], LayerPasses] = {}
        self._fullest_layer: dict[tuple[object, ...], int] = {}

    def least_bytes(self, base: Plan) -> int:
        """Device memory that plans take whose phases are single layers, or more."""
        # An embedding holds the rows of all earlier micro-batches.
        key = (*passes_key(base), base.batch.accumulation)
        if key not in self._fullest_layer:
            self._fullest_layer[key] = self.memory(base).of_fullest_layer()
        return self._fullest_layer[key] + self._process_bytes(base)

    def places(
        self, base: Plan, table: PhaseTable, budget_bytes: int
    ) -> list[list[tuple[Tier, bool]]]:
        """Where each plan fits: its nearest tier, and whether activations are there too, `[plan]`.

        Places without activations come first.
        """
        memory, tiers = self.memory(base), offload_tiers(self._space.machine)
        found: list[list[tuple[Tier, bool]]] = [[] for _ in table.stages]
        for activations in (False, True):
            least = memory.of_fullest_stage(table, offloads_activations=activations)
            waiting = least + self._process_bytes(base) <= budget_bytes
            outputs = memory.offloaded_outputs(table) if activations else None
            for tier in tiers if waiting.any() else ():
                needed = self._state.fullest_bytes(base, table, tier, outputs)
                holds = waiting & (needed <= tier.capacity_bytes)
                for row in np.flatnonzero(holds).tolist():
                    found[row].append((tier, activations))
                waiting &= ~holds
        return found

    def memory(self, base: Plan) -> PhaseMemory:
        """Bounds on the device memory of a plan in every number of phases."""
        graph, passes = self._space.graph, passes_key(base)
        if passes not in self._layer_passes:
            self._layer_passes[passes] = LayerPasses.of(base, graph)
        state = state_key(base)
        if state not in self._layer_state:
            self._layer_state[state] = LayerState.of(base, graph)
        return PhaseMemory(base, graph, self._layer_state[state], self._layer_passes[passes])

    def _process_bytes(self, base: Plan) -> int:
        return self._space.machine.device.process_bytes(compiled=base.compile)
