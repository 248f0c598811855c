"""Searches plans in phases, for models that do not fit in device memory at once.

Few of the many plans in phases are simulated, always the one that may still be the fastest. Bounds,
each tighter and dearer than the one before, show that a plan does not fit or is slower than a known
one:

- sizes of layers, and seconds of their passes (`phase_bounds`);
- programs of 3 and 4 micro-batches. What a stage holds at an instruction grows by a constant with
  every further micro-batch, so that they give the peak of the full plan;
- programs of 2 and 3. The end of a step is the largest of sums that each grow by a constant with
  every micro-batch, so a line through the ends of the two is never above the full plan's.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from windlass.cost import predict_plan, predict_time
from windlass.planner.result import EvaluatedPlan, with_budget
from windlass.planner.search.evaluate import stage_peak_bytes
from windlass.planner.search.phase_bounds import (
    LayerPasses,
    LayerState,
    PassTimes,
    PhaseMemory,
    StateExchanges,
    min_step_seconds,
)
from windlass.planner.space.options import offload_tiers
from windlass.planner.space.phase_space import (
    OffloadedState,
    base_plans,
    state_key,
    with_state_on,
)
from windlass.planner.space.phase_table import PhaseTable
from windlass.planner.space.plan_space import PlanSpace
from windlass.program import (
    Program,
    lower,
    memory_profile,
    plan_errors,
)
from windlass.schema import Graph, Machine, Plan, Prediction, Tier

_SHORT_MICROBATCHES = 3
"""Micro-batches of the longer of two short programs."""


class PhaseSearchResult(NamedTuple):
    """Plans in phases that were found."""

    best: tuple[EvaluatedPlan, ...]
    """Plans that fit, as far as needed, the fastest run first."""
    evaluated: int
    """Number of plans that bounds or the simulator evaluated."""


def search_phases(
    space: PlanSpace, budget_bytes: int, *, below_seconds: float = inf
) -> PhaseSearchResult:
    """The fastest plan in phases that fits, of all of `phase_space`.

    Args:
        space: what is open; `request.phases` pins the phases of a stage.
        budget_bytes: device memory budget.
        below_seconds: seconds of a step of the fastest known plan, with its share of the
            compilation; plans that cannot be faster are not examined.
    """
    small = list(_fitting_by_size(space, budget_bytes))
    order, steps = count(), space.request.train.steps
    # Plans with a lower bound on their step time; those examined already are a `TruncatedPlan`.
    waiting: list[tuple[float, int, Plan | TruncatedPlan]]
    waiting = [(seconds, next(order), plan) for seconds, plan in small]
    heapify(waiting)
    evaluated: list[tuple[float, int, EvaluatedPlan]] = []
    best = below_seconds
    while waiting and waiting[0][0] < best:
        item = heappop(waiting)[2]
        if isinstance(item, TruncatedPlan):
            prediction = with_budget(item.predict_full(), budget_bytes)
            seconds = prediction.step_seconds + prediction.compile_seconds / steps
            evaluated.append((seconds, len(evaluated), (item.plan, prediction)))
            best = min(best, seconds)
        elif (short := next(with_offload_tiers(item, space, budget_bytes), None)) is not None:
            heappush(waiting, (short.step_seconds, next(order), short))
    found = sorted(evaluated, key=itemgetter(0, 1))
    return PhaseSearchResult(tuple(each for _, _, each in found), len(small))


def may_fit_in_phases(space: PlanSpace, budget_bytes: int) -> bool:
    """Whether some plan in phases may fit, as far as short programs tell."""
    small = (plan for _, plan in _fitting_by_size(space, budget_bytes))
    return any(next(with_offload_tiers(plan, space, budget_bytes), None) for plan in small)


def _fitting_by_size(space: PlanSpace, budget_bytes: int) -> Iterator[tuple[float, Plan]]:
    """Plans in phases that fit by layer sizes alone, with lower bounds on their step time."""
    graph, machine = space.graph, space.machine
    tiers, state, times = offload_tiers(machine), OffloadedState(space), PassTimes(graph, machine)
    sizes = _PlanSizes(space, budget_bytes, state)
    exchanges = StateExchanges(graph, machine)
    for base in base_plans(space) if tiers else ():
        table = state.table_with_room(base)
        if table is None:
            continue
        offloaded = with_state_on(base, tiers[0].name, activations=False)
        places = sizes.places(base, table)
        rows = [row for row, place in enumerate(places) if place]
        plans = [offloaded.model_copy(update={"stages": table.stages[row]}) for row in rows]
        if plans and not plan_errors(plans[0], graph, machine):
            seconds = min_step_seconds(base, table, times.of(plans[0]), exchanges.of(plans[0]))
            yield from zip(seconds[rows].tolist(), plans, strict=True)


def with_offload_tiers(
    plan: Plan, space: PlanSpace, budget_bytes: int
) -> Iterator["TruncatedPlan"]:
    """The plan offloaded to the nearest tier that holds it, if it fits.

    Activations stay on the device if there is room: a transfer that is not needed delays nothing.
    """
    state = OffloadedState(space)
    table = PhaseTable.of(plan, (plan.stages,), space.graph)
    for tier, activations in _PlanSizes(space, budget_bytes, state).places(plan, table)[0]:
        offloaded = with_state_on(plan, tier.name, activations=activations)
        short = TruncatedPlan(offloaded, space.graph, space.machine)
        if (
            not plan_errors(offloaded, space.graph, space.machine)
            and short.peak_bytes <= budget_bytes
        ):
            yield short


class _PlanSizes:
    """What fits by layer sizes alone.

    Args:
        space: the plan space.
        budget_bytes: device memory budget.
        state: bytes of state in offload tiers.
    """

    def __init__(self, space: PlanSpace, budget_bytes: int, state: OffloadedState) -> None:
        self._space, self._budget_bytes, self._state = space, budget_bytes, state
        self._layer_state: dict[tuple[object, ...], LayerState] = {}
        self._layer_passes: dict[tuple[object, ...], LayerPasses] = {}

    def places(self, base: Plan, table: PhaseTable) -> list[list[tuple[Tier, bool]]]:
        """Where each plan fits: its nearest tier, and whether activations are there too, `[plan]`.

        Places without activations come first.
        """
        memory, tiers = self._memory(base), offload_tiers(self._space.machine)
        found: list[list[tuple[Tier, bool]]] = [[] for _ in table.stages]
        for activations in (False, True):
            least = memory.of_fullest_stage(table, offloads_activations=activations)
            waiting = least <= self._room(base)
            outputs = memory.offloaded_outputs(table) if activations else None
            for tier in tiers if waiting.any() else ():
                needed = self._state.fullest_bytes(base, table, tier, outputs)
                holds = waiting & (needed <= tier.capacity_bytes)
                for row in np.flatnonzero(holds).tolist():
                    found[row].append((tier, activations))
                waiting &= ~holds
        return found

    def _memory(self, base: Plan) -> PhaseMemory:
        graph, parallel, batch = self._space.graph, base.parallel, base.batch
        passes = (
            parallel.tensor, parallel.context, parallel.expert, base.precision, base.compile,
            base.loss, base.attention, base.stages[0].recompute, batch.micro,
        )  # fmt: skip
        if passes not in self._layer_passes:
            self._layer_passes[passes] = LayerPasses.of(base, graph)
        state = state_key(base)
        if state not in self._layer_state:
            self._layer_state[state] = LayerState.of(base, graph)
        return PhaseMemory(base, graph, self._layer_state[state], self._layer_passes[passes])

    def _room(self, base: Plan) -> int:
        """Bytes beside the process."""
        device = self._space.machine.device
        return self._budget_bytes - device.process_bytes(compiled=base.compile)


@dataclass(frozen=True)
class TruncatedPlan:
    """Peak memory of one plan and a bound on its step, from programs of few micro-batches.

    Args:
        plan: a legal plan in phases.
        graph: the graph that it partitions.
        machine: the machine that it runs on.
    """

    plan: Plan
    graph: Graph
    machine: Machine

    @cached_property
    def peak_bytes(self) -> int:
        """Peak device memory of the full plan.

        All micro-batches pass a phase before the next one begins. So what a stage holds at an
        instruction of the first, the second or the last of them grows by a constant with each one
        in between, and is largest at one of those three.
        """
        few = _SHORT_MICROBATCHES
        short, further = self._short_programs, self.plan.batch.accumulation - few
        if further <= 0 or self.machine.stack is not None:  # other software states it at once
            return max(stage_peak_bytes(self.plan, self.graph, self.machine, short))
        longer = lower(self._with_accumulation(few + 1), self.graph)
        each_stage = slice(None, None, self.plan.parallel.devices // self.plan.parallel.pipeline)
        pairs = (
            zip(self._held(program), self._held(more, without=few - 1), strict=True)
            for program, more in zip(short[each_stage], longer[each_stage], strict=True)
        )
        return max(held + further * (more - held) for pair in pairs for held, more in pair)

    def _held(self, program: Program, without: int | None = None) -> Iterator[int]:
        """Bytes in use while each instruction runs, but for those of one micro-batch."""
        process_bytes = self.machine.device.process_bytes(compiled=self.plan.compile)
        # Sizes are the plan's own: rows of an embedding's gradient grow up to its vocabulary only.
        profile = memory_profile(program, self.plan, self.graph, runtime_bytes=process_bytes)
        for each, held in zip(program.instructions, profile.bytes_by_instruction, strict=True):
            if without is None or each.micro_batch != without:
                yield held

    @cached_property
    def step_seconds(self) -> float:
        """Lower bound on step time: a line through the ends of two short programs."""
        further = self.plan.batch.accumulation - _SHORT_MICROBATCHES
        high = self._seconds(_SHORT_MICROBATCHES, self._short_programs)
        if further <= 0:
            return high
        return high + further * (high - self._seconds(_SHORT_MICROBATCHES - 1))

    def _seconds(self, accumulation: int, programs: tuple[Program, ...] = ()) -> float:
        plan = self._with_accumulation(accumulation)
        return predict_time(plan, self.graph, self.machine, programs).step_seconds

    def predict_full(self) -> Prediction:
        """Prediction of the full plan."""
        programs = lower(self.plan, self.graph)
        return predict_plan(self.plan, self.graph, self.machine, programs)

    @cached_property
    def _short_programs(self) -> tuple[Program, ...]:
        """Programs of the plan with few micro-batches."""
        return lower(self._with_accumulation(_SHORT_MICROBATCHES), self.graph)

    def _with_accumulation(self, accumulation: int) -> Plan:
        """The plan with at most this many micro-batches."""
        batch = self.plan.batch
        few = min(accumulation, batch.accumulation)
        return self.plan.model_copy(
            update={"batch": batch.model_copy(update={"accumulation": few})}
        )
