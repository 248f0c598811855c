"""Shortfall: where several devices hold a model not even in phases, what lacks and what would help.

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
from windlass.program.memory.layer_sizes import sizes_of
from windlass.program.validate_plan import plan_errors
from windlass.schema.machine import Tier
from windlass.schema.plan import DEVICE_TIER, Plan
from windlass.schema.request import BatchRequest
from windlass.units import format_bytes

_PLAYED = 4
"""Plans of the smallest sizes whose own programs tell which comes nearest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosestPlan:
    """The plan in phases that comes nearest, and what it needs of each tier."""

    plan: Plan
    near_bytes: int
    far_bytes: int
    far: Tier

    @property
    def phases(self) -> int:
        """Of the stage that has most."""
        return max(len(stage.phases) for stage in self.plan.stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
    """The plan in phases that comes nearest, and in words what it lacks and what would help."""

    plan: Plan
    told: tuple[str, ...]


def shortfall(field: PlanSpace, near_bytes: int) -> Shortfall | None:
    """What lacks on which tier with the plan in phases that comes nearest; None: there is none.

    Args:
        field: of which no plan fits.
        near_bytes: that each near tier has.
    """
    miss = closest_in_phases(field, near_bytes)
    if miss is None:
        return None
    cut = miss.plan.parallel
    lacks = (
        f"in {miss.phases} phases a stage, p{cut.pipeline} t{cut.tensor} r{cut.data}, rts "
        f"{miss.plan.sharding.parameters}, micro-batch {miss.plan.batch.micro}: "
        f"{' and '.join(_lacks(miss, near_bytes))}"
    )
    return Shortfall(plan=miss.plan, told=(lacks, *_ways(miss, field, near_bytes)))


def closest_in_phases(field: PlanSpace, near_bytes: int) -> ClosestPlan | None:
    """The plan whose fullest tier is the least too full, of those with most phases; or none."""
    tiers = offload_tiers(field.machine)
    if not tiers:
        return None
    far = max(tiers, key=lambda tier: tier.capacity_bytes)
    found: list[tuple[float, int, Plan]] = []
    for base in base_plans(field):
        finest = next(phase_partitions(base, field), None)
        if finest is not None:
            plan = with_state_on(finest, far.name, outputs=True)
            near = min_stage_bytes(plan, sizes_of(plan, field.graph))
            fullest = max(
                near / near_bytes, fullest_offloaded_bytes(plan, field) / far.capacity_bytes
            )
            found.append((fullest, len(found), plan))
    misses = [
        ClosestPlan(
            plan=plan,
            near_bytes=device_bytes(plan, lower(plan, field.graph), field.graph, field.machine),
            far_bytes=fullest_offloaded_bytes(plan, field),
            far=far,
        )
        for _, _, plan in sorted(found)[:_PLAYED]
        if not plan_errors(plan, field.graph, field.machine)
    ]
    return min(
        misses,
        key=lambda miss: max(miss.near_bytes / near_bytes, miss.far_bytes / far.capacity_bytes),
        default=None,
    )


def closest_single_device_in_phases(
    field: PlanSpace, near_bytes: int
) -> tuple[Plan, PeakMemory] | None:
    """The plan of one device in phases that comes nearest, where a tier beyond holds the rest."""
    miss = None if excludes_phases(field.request) else closest_in_phases(field, near_bytes)
    if miss is None or miss.far_bytes > miss.far.capacity_bytes:
        return None
    return miss.plan, peak_memory(miss.plan, field.graph, field.machine)


def _lacks(miss: ClosestPlan, near_bytes: int) -> Iterator[str]:
    """By how much the tiers are too small."""
    needs = (
        (DEVICE_TIER, miss.near_bytes, near_bytes),
        (miss.far.name, miss.far_bytes, miss.far.capacity_bytes),
    )
    for tier, needed, there in needs:
        if needed > there:
            yield f"{format_bytes(needed)} in `{tier}`, {format_bytes(needed - there)} too much"


def _ways(miss: ClosestPlan, field: PlanSpace, near_bytes: int) -> Iterator[str]:
    """Single changes that make it fit, with this cut and micro-batch; then other machines."""
    cut, batch = miss.plan.parallel, miss.plan.batch
    pins: dict[str, object] = {
        "parallel": field.request.parallel.model_copy(
            update={"pipeline": cut.pipeline, "tensor": cut.tensor, "data": cut.data}
        ),
        "batch": BatchRequest(micro=batch.micro),
    }
    for words, update in _changes(miss, field):
        request = field.request.model_copy(update=pins | update)
        if may_fit_in_phases(PlanSpace(request, field.graph, field.machine), near_bytes):
            yield words
    if miss.near_bytes > near_bytes:
        slices = int(miss.plan.parallel.tensor)
        times = 2 ** (ceil(miss.near_bytes / near_bytes) - 1).bit_length()
        yield (
            f"layers over {times} times as many slices (about `parallel.tensor` = {slices * times}, not "
            f"tried), or {format_bytes(miss.near_bytes)} of near memory on each device"
        )
    if miss.far_bytes > miss.far.capacity_bytes:
        devices = ceil(miss.far_bytes / miss.far.capacity_bytes) * miss.plan.parallel.devices
        yield (
            f"at least {devices} such devices with `sharding` over their replicas, or "
            f"{format_bytes(miss.far_bytes)} of `{miss.far.name}` on each"
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
