"""Streamed plans: how layers are cut into phases where a model does not fit the near tier."""

from collections.abc import Iterator, Sequence
from itertools import accumulate

from windlass.errors import Faults
from windlass.program.far import far_bytes
from windlass.search.choice import FarShortage
from windlass.search.space import plans, smaller
from windlass.spec.graph import Graph
from windlass.spec.machine import Machine, Tier
from windlass.spec.plan import Home, Plan, Stage
from windlass.spec.request import Request
from windlass.units import show_bytes

_PHASES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""How many phases are tried where the request leaves it open; each layer alone as well."""


def streamed_plans(request: Request, graph: Graph, machine: Machine) -> tuple[Plan, ...]:
    """Every plan whose weights, gradients and optimizer state live in a far tier that holds them.

    Layers are shared among as many neighbours as can: with t slices a t-th comes to each device.

    Args:
        request: pins whatever it names; the rest is open.
        graph: captured from the request's model.
        machine: what the plans are for.

    Raises:
        Faults: the request pins more phases than there are layers, or there is no far tier.
    """
    tiers = [tier for tier in machine.device.tiers[1:] if tier.read and tier.write]
    if request.phases is not None:
        _require(request.phases, graph, machine, tiers)
    counts = _PHASES if request.phases is None else (request.phases,)
    cuts = {phases_of(graph, count) for count in (*counts, graph.layers) if count <= graph.layers}
    if request.phases is not None:
        cuts = {cut for cut in cuts if len(cut) == request.phases}
    kept = {"recompute": "none", "recomputed": None}
    every = plans(request.model_copy(update=kept), graph, machine)
    slices = max(plan.cut.tensor for plan in every)
    bases = tuple(plan for plan in every if plan.cut.tensor == slices)
    # The larger the first phase, the fewer gradients wait: what two phases lack, all do.
    roomy = [base for base in bases if _at_home(base, phases_of(graph, 2), tiers, graph)]
    found = tuple(
        plan
        for base in roomy
        for cut in sorted(cuts, key=len)
        if (plan := _at_home(base, cut, tiers, graph)) is not None
    )
    if request.phases is not None and not found:
        raise Faults(
            tuple(
                f"`phases` = {request.phases} needs {show_bytes(short.needed_bytes)} on "
                f"{short.tier}, which has {show_bytes(short.capacity_bytes)}; "
                f"{_way_out(request, short, bases, graph, machine)}"
                for short in shortages(bases, graph, machine)
            )
        )
    return found


def shortages(bases: Sequence[Plan], graph: Graph, machine: Machine) -> tuple[FarShortage, ...]:
    """The far tiers that no plan could wait its turn in, and what the smallest would need there.

    Args:
        bases: whole plans, of all precisions that are open.
        graph: of at least 2 layers.
        machine: what the plans are for.
    """
    cut = phases_of(graph, 2)
    needed = {
        tier: min(_far_total(_at(plan, cut, tier.name), graph) for plan in bases)
        for tier in machine.device.tiers[1:]
    }
    return tuple(
        FarShortage(tier=tier.name, needed_bytes=nbytes, capacity_bytes=tier.capacity_bytes)
        for tier, nbytes in needed.items()
        if nbytes > tier.capacity_bytes
    )


def _way_out(
    request: Request, short: FarShortage, bases: Sequence[Plan], graph: Graph, machine: Machine
) -> str:
    """Moments in fewer bits, if the tier then holds all."""
    for moments in smaller(request.moments):
        fewer = [base.model_copy(update={"moments": moments}) for base in bases]
        lacking = {each.tier for each in shortages(fewer, graph, machine)}
        if short.tier not in lacking:
            return f"free some, or set `moments` = {moments}, with which it has room"
    return "free some, or take a smaller model"


def phases_of(graph: Graph, count: int) -> tuple[tuple[int, int], ...]:
    """The chain in `count` ranges of layers, their parameters as even as can be told at once.

    Args:
        graph: of at least `count` layers.
        count: of phases.
    """
    sums = list(accumulate(kind.parameter_count for kind in graph.layer_kinds()))
    ends: list[int] = []
    for phase in range(1, count):
        least = (ends[-1] if ends else 0) + 1
        most = graph.layers - (count - phase)
        target = sums[-1] * phase / count
        nearest = min(range(least, most + 1), key=lambda end: abs(sums[end - 1] - target))
        ends.append(nearest)
    return tuple(zip([0, *ends], [*ends, graph.layers], strict=True))


def _at_home(
    plan: Plan, cut: tuple[tuple[int, int], ...], tiers: Sequence[Tier], graph: Graph
) -> Plan | None:
    """The plan in phases, at home in the nearest tier that holds it; None if none does."""
    for tier in tiers:
        streamed = _at(plan, cut, tier.name)
        if _far_total(streamed, graph) <= tier.capacity_bytes:
            return streamed
    return None


def _at(plan: Plan, cut: tuple[tuple[int, int], ...], tier: str) -> Plan:
    """The plan in phases, at home in one tier."""
    home = Home(weights=tier, gradients=tier, optimizer=tier)
    return plan.model_copy(update={"home": home, "stages": (Stage(phases=cut),)})


def _far_total(plan: Plan, graph: Graph) -> int:
    return sum(sum(classes.values()) for classes in far_bytes(plan, graph).values())


def _require(phases: int, graph: Graph, machine: Machine, tiers: Sequence[Tier]) -> None:
    found = tuple(_faults(phases, graph, machine, tiers))
    if found:
        raise Faults(found)


def _faults(phases: int, graph: Graph, machine: Machine, tiers: Sequence[Tier]) -> Iterator[str]:
    if phases > graph.layers:
        yield (
            f"`phases` = {phases}, but `{graph.name}` has {graph.layers} layers; ask for "
            f"{graph.layers} at most"
        )
    if not tiers:
        yield (
            f"`phases` = {phases}, but `{machine.name}` states no tier beyond the near one that "
            "weights could wait in; leave `phases` out"
        )
