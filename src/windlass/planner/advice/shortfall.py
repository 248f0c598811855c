"""Shortfall: what several devices lack to hold a model even in phases, and what would help.

Each change to the request that is named was tried: with it some plan fits.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from windlass.planner.search.extrapolate import PeakMemory, peak_memory
from windlass.planner.search.phase_bounds import min_stage_bytes
from windlass.planner.search.phase_search import device_bytes, may_fit_in_phases
from windlass.planner.space.options import excludes_phases, smaller_moments
from windlass.planner.space.phase_space import (
    base_plans,
    fullest_offloaded_bytes,
    offload_tiers,
    phase_partitions,
    with_state_on,
)
from windlass.planner.space.plan_space import PlanSpace
from windlass.program.lowering.lower import lower
from windlass.program.memory.layer_sizes import plan_layer_sizes
from windlass.program.validate_plan import plan_errors
from windlass.schema.machine import Tier
from windlass.schema.plan import DEVICE_TIER, Plan
from windlass.schema.request import BatchRequest
from windlass.units import format_bytes

_MAX_LOWERED = 4
"""Plans with the smallest estimates whose programs are lowered to find the nearest one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosestPlan:
    """The plan in phases that comes nearest to fitting, and what it needs of each tier."""

    plan: Plan
    device_bytes: int
    offloaded_bytes: int
    tier: Tier

    @property
    def phases(self) -> int:
        """Phases of the stage that has most."""
        return max(len(stage.phases) for stage in self.plan.stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
    """The plan in phases that comes nearest to fitting, what it lacks and what would help."""

    plan: Plan
    sentences: tuple[str, ...]


def shortfall(field: PlanSpace, budget_bytes: int) -> Shortfall | None:
    """What the nearest plan in phases lacks, on which tier; None if there is no plan in phases.

    Args:
        field: a plan space in which no plan fits.
        budget_bytes: device memory budget.
    """
    miss = closest_in_phases(field, budget_bytes)
    if miss is None:
        return None
    parallel = miss.plan.parallel
    lacks = (
        f"in {miss.phases} phases a stage, p{parallel.pipeline} t{parallel.tensor} r{parallel.data}, rts "
        f"{miss.plan.sharding.parameters}, micro-batch {miss.plan.batch.micro}: "
        f"{' and '.join(_missing_bytes(miss, budget_bytes))}"
    )
    return Shortfall(plan=miss.plan, sentences=(lacks, *_suggestions(miss, field, budget_bytes)))


def closest_in_phases(field: PlanSpace, budget_bytes: int) -> ClosestPlan | None:
    """The plan with most phases whose fullest tier is the least overfull; None if there is none."""
    tiers = offload_tiers(field.machine)
    if not tiers:
        return None
    largest = max(tiers, key=lambda tier: tier.capacity_bytes)
    estimates: list[tuple[float, int, Plan]] = []
    for base in base_plans(field):
        finest = next(phase_partitions(base, field), None)
        if finest is not None:
            plan = with_state_on(finest, largest.name, activations=True)
            needed_bytes = min_stage_bytes(plan, plan_layer_sizes(plan, field.graph))
            fullest = max(
                needed_bytes / budget_bytes,
                fullest_offloaded_bytes(plan, field) / largest.capacity_bytes,
            )
            estimates.append((fullest, len(estimates), plan))
    misses = [
        ClosestPlan(
            plan=plan,
            device_bytes=device_bytes(plan, lower(plan, field.graph), field.graph, field.machine),
            offloaded_bytes=fullest_offloaded_bytes(plan, field),
            tier=largest,
        )
        for _, _, plan in sorted(estimates)[:_MAX_LOWERED]
        if not plan_errors(plan, field.graph, field.machine)
    ]
    return min(
        misses,
        key=lambda miss: max(
            miss.device_bytes / budget_bytes, miss.offloaded_bytes / largest.capacity_bytes
        ),
        default=None,
    )


def closest_single_device_in_phases(
    field: PlanSpace, budget_bytes: int
) -> tuple[Plan, PeakMemory] | None:
    """The nearest plan of one device in phases, if an offload tier holds the rest."""
    miss = None if excludes_phases(field.request) else closest_in_phases(field, budget_bytes)
    if miss is None or miss.offloaded_bytes > miss.tier.capacity_bytes:
        return None
    return miss.plan, peak_memory(miss.plan, field.graph, field.machine)


def _missing_bytes(miss: ClosestPlan, budget_bytes: int) -> Iterator[str]:
    """By how many bytes each tier is too small."""
    needs = (
        (DEVICE_TIER, miss.device_bytes, budget_bytes),
        (miss.tier.name, miss.offloaded_bytes, miss.tier.capacity_bytes),
    )
    for tier, needed, capacity in needs:
        if needed > capacity:
            yield f"{format_bytes(needed)} in `{tier}`, {format_bytes(needed - capacity)} too much"


def _suggestions(miss: ClosestPlan, field: PlanSpace, budget_bytes: int) -> Iterator[str]:
    """Single changes that make it fit at the same parallelism and micro-batch; then machines."""
    cut, batch = miss.plan.parallel, miss.plan.batch
    pins: dict[str, object] = {
        "parallel": field.request.parallel.model_copy(
            update={"pipeline": cut.pipeline, "tensor": cut.tensor, "data": cut.data}
        ),
        "batch": BatchRequest(micro=batch.micro),
    }
    for words, update in _changes(miss, field):
        request = field.request.model_copy(update=pins | update)
        if may_fit_in_phases(PlanSpace(request, field.graph, field.machine), budget_bytes):
            yield words
    if miss.device_bytes > budget_bytes:
        degree = int(miss.plan.parallel.tensor)
        times = 2 ** (ceil(miss.device_bytes / budget_bytes) - 1).bit_length()
        yield (
            f"{times} times the tensor-parallel degree (`parallel.tensor={degree * times}`, not "
            f"tried), or {format_bytes(miss.device_bytes)} of memory on each device"
        )
    if miss.offloaded_bytes > miss.tier.capacity_bytes:
        devices = ceil(miss.offloaded_bytes / miss.tier.capacity_bytes) * miss.plan.parallel.devices
        yield (
            f"at least {devices} such devices with `sharding.parameters` over their replicas, or "
            f"{format_bytes(miss.offloaded_bytes)} of `{miss.tier.name}` on each"
        )


def _changes(miss: ClosestPlan, field: PlanSpace) -> Iterator[tuple[str, dict[str, object]]]:
    """Changes to try, as written on the command line and as an update of the request."""
    request, batch = field.request, field.request.batch
    if request.phases is not None:
        yield f"leaving `phases` = {request.phases} open", {"phases": None}
    if batch.micro not in (None, 1):
        yield "`batch.micro=1`", {"batch": BatchRequest(micro=1)}
    replicas, pins = miss.plan.parallel.data, request.sharding
    if {pins.parameters, pins.optimizer} - {None, replicas}:
        shared = pins.model_copy(update={"parameters": replicas, "optimizer": replicas})
        words = f"`sharding.parameters={replicas} sharding.optimizer={replicas}`"
        yield words, {"sharding": shared}
    if request.precision not in (None, "bfloat16"):
        yield "`precision=bfloat16`", {"precision": "bfloat16"}
    for moments in smaller_moments(request.moments):
        yield f"`moments={moments}`", {"moments": moments}
