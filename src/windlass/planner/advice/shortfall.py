"""Shortfall: what several devices lack to hold a model even in phases, and what would help.

Each change to the request that is named was tried: with it some plan fits.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from math import ceil

import numpy as np

from windlass.planner.result import TierShortage
from windlass.planner.search.evaluate import stage_peak_bytes
from windlass.planner.search.phase_search import PhaseSizes, may_fit_in_phases
from windlass.planner.space.options import offload_tiers, smaller_moments
from windlass.planner.space.phase_space import (
    OffloadedState,
    fullest_offloaded_bytes,
    plans_of,
    with_state_on,
)
from windlass.planner.space.phase_table import with_chunks
from windlass.planner.space.plan_space import PlanSpace
from windlass.program import plan_errors
from windlass.schema import DEVICE_TIER, BatchRequest, Plan, Tier
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
    def short_tiers(self) -> tuple[TierShortage, ...]:
        """The offload tier, if it is too small."""
        if self.offloaded_bytes <= self.tier.capacity_bytes:
            return ()
        short = TierShortage(
            tier=self.tier.name,
            needed_bytes=self.offloaded_bytes,
            capacity_bytes=self.tier.capacity_bytes,
        )
        return (short,)


def shortfall(closest: ClosestPlan, space: PlanSpace, budget_bytes: int) -> tuple[str, ...]:
    """What the nearest plan in phases lacks, and what would help, a sentence each."""
    parallel = closest.plan.parallel
    lacks = (
        f"in {closest.plan.phase_count} phases a stage, PP={parallel.pipeline} "
        f"TP={parallel.tensor} DP={parallel.data} FSDP={closest.plan.sharding.parameters}, "
        f"micro-batch {closest.plan.batch.micro}: "
        f"{' and '.join(_missing_bytes(closest, budget_bytes))}"
    )
    return lacks, *_suggestions(closest, space, budget_bytes)


def closest_in_phases(space: PlanSpace, budget_bytes: int) -> ClosestPlan | None:
    """The plan with most phases whose fullest tier is the least overfull; None if there is none."""
    tiers = offload_tiers(space.machine)
    if not tiers:
        return None
    largest = max(tiers, key=lambda tier: tier.capacity_bytes)
    state, order = OffloadedState(space), count()
    sizes = PhaseSizes(space, state)
    estimates: list[tuple[float, float, int, Plan]] = []
    for share, pipeline, config in _by_least_share(space, largest):
        if len(estimates) == _MAX_LOWERED and share > estimates[-1][0]:
            break
        for base in plans_of(space, pipeline, config):
            table, least = state.table(base), sizes.least_bytes(base) / budget_bytes
            if len(estimates) == _MAX_LOWERED and least > estimates[-1][0]:
                break
            if table is None:
                continue
            plan = with_state_on(base, largest.name, activations=True)
            plan = with_chunks(plan, table.stages[0])
            memory = sizes.memory(base)
            device_bytes = int(memory.of_fullest_stage(table, offloads_activations=True)[0])
            outputs = memory.offloaded_outputs(table)
            needed = int(state.fullest_bytes(base, table, largest, outputs)[0])
            near, far = device_bytes / budget_bytes, needed / largest.capacity_bytes
            estimates.append((max(near, far), near + far, next(order), plan))
            estimates = sorted(estimates)[:_MAX_LOWERED]
    misses = [
        ClosestPlan(
            plan=plan,
            device_bytes=max(stage_peak_bytes(plan, space.graph, space.machine)),
            offloaded_bytes=fullest_offloaded_bytes(plan, space.graph),
            tier=largest,
        )
        for *_, plan in estimates
        if not plan_errors(plan, space.graph, space.machine)
    ]
    return min(
        misses,
        key=lambda closest: _fullness(closest, budget_bytes),
        default=None,
    )


def _fullness(closest: ClosestPlan, budget_bytes: int) -> tuple[float, float]:
    """Share of its fuller tier that a plan takes, and of both."""
    near = closest.device_bytes / budget_bytes
    far = closest.offloaded_bytes / closest.tier.capacity_bytes
    return max(near, far), near + far


def _by_least_share(space: PlanSpace, tier: Tier) -> list[tuple[float, int, int]]:
    """Stages and configuration of all plans, by the least share of a tier that their state takes.

    The share counts the optimizer state of an average stage, of which each replica has a part.
    """
    table, trained = space.table, space.graph.trained_count
    bases = [space.base.model_copy(update={"precision": mode.precision}) for mode in table.modes]
    each = np.array([base.optimizer_bytes_per_parameter * trained for base in bases])
    pipelines = np.array([each for each in space.pipeline_degrees if each <= space.graph.layers])
    devices = pipelines[:, None] * table.devices
    shares = each[table.mode] / devices / tier.capacity_bytes
    stage, config = np.nonzero(devices <= space.machine.devices)
    rows = zip(shares[stage, config], pipelines[stage], config, strict=True)
    return sorted((float(share), int(pipeline), int(config)) for share, pipeline, config in rows)


def _missing_bytes(closest: ClosestPlan, budget_bytes: int) -> Iterator[str]:
    """A phrase for each tier that is too small, with the missing bytes."""
    needs = (
        (DEVICE_TIER, closest.device_bytes, budget_bytes),
        (closest.tier.name, closest.offloaded_bytes, closest.tier.capacity_bytes),
    )
    for tier, needed, capacity in needs:
        if needed > capacity:
            yield f"{format_bytes(needed)} in `{tier}`, {format_bytes(needed - capacity)} too much"


def _suggestions(closest: ClosestPlan, space: PlanSpace, budget_bytes: int) -> Iterator[str]:
    """Single changes that make it fit at the same parallelism and micro-batch; then machines."""
    cut, batch = closest.plan.parallel, closest.plan.batch
    pins: dict[str, object] = {
        "parallel": space.request.parallel.model_copy(
            update={
                "pipeline": cut.pipeline,
                "tensor": cut.tensor,
                "data": cut.data,
                "context": cut.context or 1,
            }
        ),
        "batch": BatchRequest(micro=batch.micro),
    }
    for words, update in _changes(closest, space):
        request = space.request.model_copy(update=pins | update)
        if may_fit_in_phases(replace(space, request=request), budget_bytes):
            yield words
    if closest.short_tiers:
        devices = (
            ceil(closest.offloaded_bytes / closest.tier.capacity_bytes)
            * closest.plan.parallel.devices
        )
        yield (
            f"at least {devices} such devices with `sharding.parameters` over their replicas, or "
            f"{format_bytes(closest.offloaded_bytes)} of `{closest.tier.name}` on each"
        )


def _changes(closest: ClosestPlan, space: PlanSpace) -> Iterator[tuple[str, dict[str, object]]]:
    """Changes to try, as written on the command line and as an update of the request."""
    request, batch = space.request, space.request.batch
    if request.phases is not None:
        yield f"leaving `phases` = {request.phases} open", {"phases": None}
    if batch.micro not in (None, 1):
        yield "`batch.micro=1`", {"batch": BatchRequest(micro=1)}
    replicas, pins = closest.plan.parallel.data, request.sharding
    if {pins.parameters, pins.optimizer} - {None, replicas}:
        shared = pins.model_copy(update={"parameters": replicas, "optimizer": replicas})
        words = f"`sharding.parameters={replicas} sharding.optimizer={replicas}`"
        yield words, {"sharding": shared}
    half = space.machine.device.half_precision
    if request.precision not in (None, half):
        yield f"`precision={half}`", {"precision": half}
    for moments in smaller_moments(request):
        yield f"`moments={moments}`", {"moments": moments}
