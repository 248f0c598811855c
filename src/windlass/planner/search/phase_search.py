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
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from windlass.cost import ArrayClock, Floats, predict_plan, simulated_seconds
from windlass.planner.result import EvaluatedPlan, with_budget
from windlass.planner.search.bounds import ConfigBounds
from windlass.planner.search.config_prices import CLOCK_ERROR
from windlass.planner.search.evaluate import stage_peak_bytes
from windlass.planner.search.phase_bounds import (
    LayerPasses,
    LayerState,
    PhaseMemory,
    PhasePrices,
    min_step_seconds,
)
from windlass.planner.space.options import offload_tiers
from windlass.planner.space.phase_space import (
    OffloadedState,
    passes_key,
    plans_of,
    state_key,
    with_state_on,
)
from windlass.planner.space.phase_table import PhaseTable, with_chunks
from windlass.planner.space.plan_space import PlanSpace
from windlass.program import (
    Program,
    lower_stages,
    memory_profile,
    plan_errors,
)
from windlass.schema import Plan, Prediction, Tier

_SHORT_MICROBATCHES = 3
"""Micro-batches of the shorter of two short programs."""


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
    ) -> Iterator["TruncatedPlan"]:
        """Plans that fit by their programs and may be faster than any before, quickest bound first.

        Args:
            budget_bytes: device memory budget.
            bounds: what no configuration of the space is faster than.
            below_seconds: seconds of a step that is known; no slower plan is looked for.
        """
        self._budget_bytes, self._bounds = budget_bytes, bounds
        self.best_seconds, self.examined, order = below_seconds, 0, count()
        waiting: list[tuple[float, int, _Shape | Plan | TruncatedPlan]]
        waiting = [(seconds, next(order), shape) for seconds, shape in self._shapes()]
        heapify(waiting)
        while waiting and waiting[0][0] < self.best_seconds:
            item = heappop(waiting)[2]
            if isinstance(item, TruncatedPlan):
                yield item
            elif isinstance(item, _Shape):
                for seconds, plan in self._fitting_by_size(item):
                    self.examined += 1
                    if seconds < self.best_seconds:
                        heappush(waiting, (seconds, next(order), plan))
            elif (short := next(self._with_offload_tiers(item), None)) is not None:
                heappush(waiting, (short.step_seconds, next(order), short))

    def _shapes(self) -> Iterator[tuple[float, _Shape]]:
        """Configurations on each number of stages, with seconds that no plan of them is below."""
        space = self._space
        if not offload_tiers(space.machine):
            return
        pipelines = np.array(
            [each for each in space.pipeline_degrees if each <= space.graph.layers]
        )
        near = self._bounds.products(pipelines) < self.best_seconds
        configs = np.flatnonzero(near.any(axis=0))
        near[:, configs] &= self._bounds.holds_layers(configs) if configs.size else True
        stage, config = np.nonzero(near)
        if config.size:
            stages = pipelines[stage]
            seconds = self._bounds.in_phases(stages, config, self.best_seconds) * (1 - CLOCK_ERROR)
            for at in np.flatnonzero(seconds < self.best_seconds).tolist():
                yield float(seconds[at]), _Shape(int(stages[at]), int(config[at]))

    def _fitting_by_size(self, shape: _Shape) -> Iterator[tuple[float, Plan]]:
        """Plans that fit by layer sizes alone and may be fastest, with bounds on their steps."""
        graph, machine = self._space.graph, self._space.machine
        nearest, bounds = offload_tiers(machine)[0].name, self._bounds
        passes = bounds.phase_stages(shape.pipeline, np.array([shape.config]))[1][0]
        even = bounds.spanning_passes(shape.pipeline, np.array([shape.config]))[0]
        begins = np.array(self._space.chunk_bounds(shape.pipeline))
        _, turns = bounds.turns(shape.pipeline)
        if shape not in self._bases:
            self._bases[shape] = tuple(plans_of(self._space, *shape))
        for index, base in enumerate(self._bases[shape]):
            offloaded = with_state_on(base, nearest, activations=False)
            once, again, alone = self._prices.exchanges(offloaded)
            if base.parallel.schedule == "interleaved":
                least = even + once[-1] / shape.pipeline
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

    def _with_offload_tiers(self, plan: Plan) -> Iterator["TruncatedPlan"]:
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


@dataclass(frozen=True)
class TruncatedPlan:
    """Peak memory of one plan and a bound on its step, from programs of few micro-batches.

    Args:
        plan: a legal plan in phases.
        prices: of plans of the same model and machine.
    """

    plan: Plan
    prices: PhasePrices
    _lowered: dict[int, tuple[Program, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @cached_property
    def peak_bytes(self) -> int:
        """Peak device memory of the full plan.

        All micro-batches pass a phase before the next one begins. So what a stage holds at an
        instruction of the first, the second or the last of them grows by a constant with each one
        in between, and is largest at one of those three.
        """
        graph, machine = self.prices.graph, self.prices.machine
        further = self.plan.batch.accumulation - _SHORT_MICROBATCHES
        if self._spans_stages or further <= 0:
            return max(stage_peak_bytes(self.plan, graph, machine, self._programs(further)))
        return max(self._peak_of(program) for program in self._programs(1))

    def _peak_of(self, program: Program) -> int:
        """Bytes of the full plan on one stage, by its program of one micro-batch more.

        Each further micro-batch leaves what its last but one does.
        """
        graph, process_bytes = self.prices.graph, self.prices.machine.device.process_bytes
        # Sizes are the plan's own: rows of an embedding's gradient grow up to its vocabulary only.
        profile = memory_profile(
            program, self.plan, graph, runtime_bytes=process_bytes(compiled=self.plan.compile)
        )
        last = np.array(
            [each.micro_batch == _SHORT_MICROBATCHES - 1 for each in program.instructions]
        )
        left = np.cumsum(np.where(last, profile.changes, 0))
        further = self.plan.batch.accumulation - _SHORT_MICROBATCHES - 1
        held = np.array(profile.bytes_by_instruction) + further * left
        return int(held[~last].max())

    @property
    def _spans_stages(self) -> bool:
        """Whether each phase is a model chunk, which all stages run at a time.

        What comes early from the other end of the pipeline then depends on how many micro-batches
        there are, so that no short program tells of the full one.
        """
        return self.plan.parallel.virtual_stages > 1

    @cached_property
    def step_seconds(self) -> float:
        """Lower bound on step time: a line through the ends of two short programs."""
        further = self.plan.batch.accumulation - _SHORT_MICROBATCHES
        if self._spans_stages or further <= 0:
            return self._seconds(further)
        few = self._seconds(0)
        return few + further * (self._seconds(1) - few)

    @property
    def whole_step_seconds(self) -> float:
        """Step time of the full plan."""
        return self._seconds(self.plan.batch.accumulation)

    def _seconds(self, more: int) -> float:
        """Seconds of a step of few micro-batches and some more."""
        plan, prices = self._shortened(more), self.prices
        return simulated_seconds(
            plan, prices.graph, prices.machine, prices.costs(plan), self._programs(more)
        )

    @cached_property
    def prediction(self) -> Prediction:
        """Prediction of the full plan."""
        programs = lower_stages(self.plan, self.prices.graph)
        return predict_plan(self.plan, self.prices.graph, self.prices.machine, programs)

    def _programs(self, more: int) -> tuple[Program, ...]:
        """Programs of all stages, of few micro-batches and some more."""
        if more not in self._lowered:
            self._lowered[more] = lower_stages(self._shortened(more), self.prices.graph)
        return self._lowered[more]

    def _shortened(self, more: int) -> Plan:
        """The plan with few micro-batches and some more, if it has as many."""
        batch = self.plan.batch
        few = min(batch.accumulation, _SHORT_MICROBATCHES + more)
        return self.plan.model_copy(
            update={"batch": batch.model_copy(update={"accumulation": few})}
        )
