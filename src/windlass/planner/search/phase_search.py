"""Searches plans in phases, for models that do not fit in device memory at once.

Few of the many plans in phases are simulated, always the one that may still be the fastest. Bounds,
each tighter and dearer than the one before, show that a plan does not fit or is slower than a known
one:

- sizes of layers, and seconds of their passes (`phase_bounds`);
- two short programs, of 2 and 3 micro-batches. More micro-batches never need less memory. The end
  of a step is the largest of sums that each grow by a constant with every micro-batch, so a line
  through the ends of the two is never above the full plan's; nor, on a single stage, is one through
  their peaks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from operator import itemgetter
from typing import NamedTuple

from windlass.cost import predict_plan
from windlass.planner.result import EvaluatedPlan, with_budget
from windlass.planner.search.evaluate import stage_peak_bytes
from windlass.planner.search.phase_bounds import (
    PassTimes,
    max_layer_bytes,
    min_stage_bytes,
    min_step_seconds,
    waiting_activation_bytes,
)
from windlass.planner.space.options import offload_tiers
from windlass.planner.space.phase_space import (
    OffloadedState,
    base_plans,
    with_state_on,
)
from windlass.planner.space.plan_space import PlanSpace
from windlass.program import (
    LayerSizes,
    Program,
    lower,
    plan_errors,
    plan_layer_sizes,
    tied_owner_layers,
)
from windlass.schema import Graph, Machine, Plan, Prediction, ShardingDegrees

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
            prediction = item.predict_full(budget_bytes)
            if prediction is not None:
                seconds = prediction.step_seconds + prediction.compile_seconds / steps
                evaluated.append((seconds, len(evaluated), (item.plan, prediction)))
                best = min(best, seconds)
                continue
            if item.plan.is_offloaded("activations"):
                continue
            tries = with_offload_tiers(item.plan, space, budget_bytes, (True,))
        else:
            tries = with_offload_tiers(item, space, budget_bytes)
        if (short := next(tries, None)) is not None:
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
    tiers, owners = offload_tiers(machine), tied_owner_layers(graph)[-1]
    state, times = OffloadedState(space), PassTimes(graph, machine)
    for base in _with_fitting_layers(space, budget_bytes) if tiers else ():
        several = [
            with_state_on(plan, tiers[0].name, activations=False) for plan in state.partitions(base)
        ]
        if not several or plan_errors(several[0], graph, machine):
            continue
        sizes = plan_layer_sizes(base, graph)
        room = budget_bytes - machine.device.process_bytes(compiled=base.compile)
        first = graph.first_trained
        small = [
            plan
            for plan in several
            if min_stage_bytes(plan, sizes, owners, first_trained=first) <= room
            and any(_held_by_tiers(plan, space, budget_bytes, sizes, state))
        ]
        yield from ((min_step_seconds(plan, times.of(plan)), plan) for plan in small)


def _with_fitting_layers(space: PlanSpace, budget_bytes: int) -> Iterator[Plan]:
    """Every open plan whose single layers each fit on the device."""
    known: dict[tuple[object, ...], int] = {}
    for base in base_plans(space):
        batch = base.batch
        key = base.parallel.tensor, base.precision, base.compile, batch
        if key not in known:
            whole = base.model_copy(update={"sharding": ShardingDegrees()})
            known[key] = max_layer_bytes(whole, plan_layer_sizes(whole, space.graph))
        if known[key] <= budget_bytes - space.machine.device.process_bytes(compiled=base.compile):
            yield base


def with_offload_tiers(
    plan: Plan, space: PlanSpace, budget_bytes: int, outputs: tuple[bool, ...] = (False, True)
) -> Iterator["TruncatedPlan"]:
    """The plan offloaded to the nearest tier that holds it, if short programs fit.

    Args:
        plan: a plan in phases.
        space: the plan space.
        budget_bytes: device memory budget.
        outputs: whether activations are offloaded too, in the order in which this is tried. They
            stay on the device if there is room: a transfer that is not needed delays nothing.
    """
    sizes, state = plan_layer_sizes(plan, space.graph), OffloadedState(space)
    for offloaded in _held_by_tiers(plan, space, budget_bytes, sizes, state, outputs):
        short = TruncatedPlan(offloaded, space.graph, space.machine)
        if (
            not plan_errors(offloaded, space.graph, space.machine)
            and short.peak_bytes <= budget_bytes
        ):
            yield short


def _held_by_tiers(
    plan: Plan,
    space: PlanSpace,
    budget_bytes: int,
    sizes: tuple[LayerSizes, ...],
    state: OffloadedState,
    outputs: tuple[bool, ...] = (False, True),
) -> Iterator[Plan]:
    """The plan offloaded to the nearest tier that holds it, if what waits on the device fits."""
    tiers, first = offload_tiers(space.machine), space.graph.first_trained
    for activations in outputs:
        nearby = with_state_on(plan, tiers[0].name, activations=activations)
        if waiting_activation_bytes(nearby, sizes, first_trained=first) > budget_bytes:
            continue
        for tier in tiers:
            needed = state.fullest_bytes(plan, tier, sizes if activations else None)
            if needed <= tier.capacity_bytes:
                yield with_state_on(plan, tier.name, activations=activations)
                break


@dataclass(frozen=True)
class TruncatedPlan:
    """Bounds of one plan from what it does with two and three micro-batches.

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
        """Lower bound on peak device memory.

        On a single stage memory at each moment grows linearly with the micro-batches, so that a
        line through two peaks is never above the full plan's. Several stages wait for each other,
        and what they hold may level off: there the few micro-batches themselves are the bound.
        """
        few, (_, programs) = _SHORT_MICROBATCHES, self._short_programs
        # Sizes are the plan's own: rows of an embedding's gradient grow up to its vocabulary only.
        high = max(stage_peak_bytes(self.plan, self.graph, self.machine, programs))
        if self.plan.parallel.pipeline > 1 or self.plan.batch.accumulation <= few:
            return high
        more = lower(self._with_accumulation(few + 1), self.graph)
        higher = max(stage_peak_bytes(self.plan, self.graph, self.machine, more))
        return high + (self.plan.batch.accumulation - few) * (higher - high)

    @cached_property
    def step_seconds(self) -> float:
        """Lower bound on step time: a line through the ends of two short programs."""
        plan, programs = self._short_programs
        low = predict_plan(
            self._with_accumulation(_SHORT_MICROBATCHES - 1), self.graph, self.machine
        ).step_seconds
        high = predict_plan(plan, self.graph, self.machine, programs).step_seconds
        return high + max(0, self.plan.batch.accumulation - _SHORT_MICROBATCHES) * (high - low)

    def predict_full(self, budget_bytes: int) -> Prediction | None:
        """Prediction of the full plan; None if its own program exceeds the budget."""
        programs = lower(self.plan, self.graph)
        if max(stage_peak_bytes(self.plan, self.graph, self.machine, programs)) > budget_bytes:
            return None
        return with_budget(
            predict_plan(self.plan, self.graph, self.machine, programs), budget_bytes
        )

    @cached_property
    def _short_programs(self) -> tuple[Plan, tuple[Program, ...]]:
        """The plan with few micro-batches, and its programs."""
        plan = self._with_accumulation(_SHORT_MICROBATCHES)
        return plan, lower(plan, self.graph)

    def _with_accumulation(self, accumulation: int) -> Plan:
        """The plan with at most this many micro-batches."""
        batch = self.plan.batch
        few = min(accumulation, batch.accumulation)
        return self.plan.model_copy(
            update={"batch": batch.model_copy(update={"accumulation": few})}
        )
