"""Checks whether offload tiers have room for what a single-device request wants to offload."""

from collections.abc import Sequence

from windlass.errors import InputErrors
from windlass.planner.result import TierShortage
from windlass.planner.space.options import offload_tiers, smaller_moments, vary
from windlass.planner.space.phase_space import fullest_offloaded_bytes, with_state_on
from windlass.planner.space.plan_space import PlanSpace
from windlass.planner.space.stage_partition import balanced_partition
from windlass.schema import Graph, Machine, Offload, Plan, Stage
from windlass.units import format_bytes


def require_phases(space: PlanSpace) -> None:
    """Refuses a pinned number of phases that no tier has room for.

    Raises:
        InputErrors: no tier is large enough.
    """
    phases, graph, machine = space.request.phases or 1, space.graph, space.machine
    if phases == 1:
        return
    shortages = tier_shortages(_bases(space), graph, machine)
    if len(shortages) == len(offload_tiers(machine)):
        raise InputErrors(
            tuple(
                f"`phases` = {phases} needs {format_bytes(short.needed_bytes)} on "
                f"{short.tier}, which has {format_bytes(short.capacity_bytes)}; "
                f"{_suggestion(space, short)}"
                for short in shortages
            )
        )


def require_optimizer_tier(space: PlanSpace) -> None:
    """Refuses a pinned tier for optimizer state that has no room for it, whatever else is open.

    Raises:
        InputErrors: the tier is too small.
    """
    pin = space.request.offload.optimizer
    for tier in offload_tiers(space.machine):
        if tier.name == pin:
            away = {"offload": Offload(optimizer=pin)}
            bases = [plan.model_copy(update=away) for plan in _bases(space)]
            needed = min(fullest_offloaded_bytes(plan, space.graph) for plan in bases)
            if needed > tier.capacity_bytes:
                sizes = f"{format_bytes(needed)}, but it has {format_bytes(tier.capacity_bytes)}"
                fix = "leave it open, or set `moments` to fewer bits"
                raise InputErrors((f"`offload.optimizer` = {pin} needs {sizes}; {fix}",))


def _bases(space: PlanSpace) -> list[Plan]:
    """A plan of one device in every precision that is open."""
    return [vary(space.base, precision=each) for each in space.precisions]


def tier_shortages(
    bases: Sequence[Plan], graph: Graph, machine: Machine
) -> tuple[TierShortage, ...]:
    """Offload tiers without room for any plan in phases, and the least that would be needed there.

    Args:
        bases: plans without phases, in every precision that is open.
        graph: a graph of at least 2 layers.
    """
    # The larger the first phase, the fewer gradients are offloaded. If two phases lack room on a
    # tier, so does any other number of phases.
    phases = balanced_partition(tuple(kind.parameter_count for kind in graph.layer_kinds()), 2)
    halves = {"stages": (Stage(phases=phases),)}
    needed = {
        tier: min(
            fullest_offloaded_bytes(
                with_state_on(plan.model_copy(update=halves), tier.name, activations=False), graph
            )
            for plan in bases
        )
        for tier in offload_tiers(machine)
    }
    return tuple(
        TierShortage(tier=tier.name, needed_bytes=nbytes, capacity_bytes=tier.capacity_bytes)
        for tier, nbytes in needed.items()
        if nbytes > tier.capacity_bytes
    )


def _suggestion(space: PlanSpace, short: TierShortage) -> str:
    """Suggests moments in fewer bits, if the tier then has room."""
    for moments in smaller_moments(space.request):
        fewer = [base.model_copy(update={"moments": moments}) for base in _bases(space)]
        too_small = {each.tier for each in tier_shortages(fewer, space.graph, space.machine)}
        if short.tier not in too_small:
            return f"free some, or set `moments` = {moments}, with which it has room"
    return "free some, or take a smaller model"
