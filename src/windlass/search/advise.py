"""Advise: where nothing fits, by how much, and the cheapest changes that would make it fit."""

from collections.abc import Iterator, Sequence
from itertools import combinations
from math import ceil

from windlass.search.choice import Advice, Change, FarShortage
from windlass.search.sieve import sieve
from windlass.search.space import plans, precisions, sequence_of, smaller, vary
from windlass.search.streamed import shortages, streamed_plans
from windlass.search.ways import ways
from windlass.search.weigh import Memory, holdable, memory_of, state_bytes, weigh
from windlass.spec.graph import Graph
from windlass.spec.machine import Machine
from windlass.spec.plan import Plan
from windlass.spec.request import BatchRequest, Request

LEAST_NAMED = 3
"""Plans that fit are named at least, where there are so many."""

_SHORTEST = 64
"""Tokens below which a shorter sequence is no longer worth advising."""

_MIB = 2**20


def advise(
    request: Request, graph: Graph, machine: Machine, refused: Sequence[tuple[Plan, Memory]]
) -> Advice:
    """What would make the request fit.

    Args:
        request: what was asked.
        graph: captured from the request's model.
        machine: asked for.
        refused: the nearest plan of each family, nearest first; at least one.
    """
    near_bytes = request.near or machine.device.near.capacity_bytes
    nearest, memory = refused[0]
    state = min(state_bytes(plan, graph) for plan, _ in refused)
    left = near_bytes - machine.device.process_bytes(compiled=False)
    changes = list(_budget(memory, nearest, machine))
    if state <= left:
        changes += _changes(request, graph, machine, nearest, near_bytes)
    changes += _ways(request, graph, machine, nearest, near_bytes, changes)
    changes += _fewer_bits(request, graph, machine, nearest, near_bytes)
    return Advice(
        near_bytes=near_bytes,
        needed_bytes=memory.peak_bytes,
        over_bytes=memory.peak_bytes - near_bytes,
        by_class=memory.by_class,
        changes=tuple(sorted(changes, key=lambda change: (change.cost, len(change.overrides)))),
        state_bytes=state,
        far=_far(graph, nearest, machine),
        devices=ceil(state / left) if left > 0 else None,
    )


def _far(graph: Graph, nearest: Plan, machine: Machine) -> tuple[FarShortage, ...]:
    """The tiers that lack room for the model in phases, with its state in either precision."""
    if graph.layers < 2:
        return ()
    bases = [vary(nearest, precision=precision) for precision in precisions(machine)]
    return shortages(bases, graph, machine)


def _budget(memory: Memory, nearest: Plan, machine: Machine) -> Iterator[Change]:
    """A larger budget, where the machine has it."""
    mebibytes = ceil(memory.peak_bytes / _MIB)
    if mebibytes * _MIB <= machine.device.near.capacity_bytes:
        yield Change(
            overrides=(f"near={mebibytes}MiB",),
            plan=nearest,
            peak_bytes=memory.peak_bytes,
            cost=0.0,
        )


def _changes(
    request: Request, graph: Graph, machine: Machine, nearest: Plan, near_bytes: int
) -> Iterator[Change]:
    """Pins let go, fewest first, and a shorter sequence; no change that holds a smaller one."""
    base = _seconds_per_token(nearest, graph, machine, near_bytes)
    pins = tuple(_pins(request, machine))
    worked: list[frozenset[str]] = []
    for count in range(1, len(pins) + 1):
        for freed in combinations(pins, count):
            if any(small <= set(freed) for small in worked):
                continue
            found = sieve(
                plans(_without(request, freed), graph, machine), graph, machine, near_bytes
            ).fitting
            if found:
                worked.append(frozenset(freed))
                best, cost = _cheapest(found, graph, machine, base, near_bytes)
                yield _change(request, freed, best, cost, graph, machine)
    for freed in ((), *((pins,) if pins and not worked else ())):
        shorter = _shorter(_without(request, freed), graph, machine, near_bytes)
        if shorter:
            best, cost = _cheapest(shorter, graph, machine, base, near_bytes)
            yield _change(request, freed, best, cost, graph, machine)
            return


def _ways(
    request: Request,
    graph: Graph,
    machine: Machine,
    nearest: Plan,
    near_bytes: int,
    changes: Sequence[Change],
) -> tuple[Change, ...]:
    """More changes, of kinds that are not among them, so that `LEAST_NAMED` fit this budget."""
    within = [change for change in changes if change.peak_bytes <= near_bytes]
    base = _seconds_per_token(nearest, graph, machine, near_bytes)
    return ways(request, graph, machine, near_bytes, base=base, count=LEAST_NAMED, beside=within)


def _fewer_bits(
    request: Request, graph: Graph, machine: Machine, nearest: Plan, near_bytes: int
) -> Iterator[Change]:
    """Moments in fewer bits, with all layers near or else in phases."""
    base = _seconds_per_token(nearest, graph, machine, near_bytes)
    for moments in smaller(request.moments):
        other = request.model_copy(update={"moments": moments})
        found: tuple[Plan, ...] = ()
        if request.phases in (None, 1):
            found = sieve(
                holdable(plans(other, graph, machine), graph, near_bytes),
                graph,
                machine,
                near_bytes,
            ).fitting
        if not found and request.phases != 1:
            turns = streamed_plans(other, graph, machine)
            found = sieve(turns, graph, machine, near_bytes).fitting
        if found:
            best, cost = _cheapest(found, graph, machine, base, near_bytes)
            yield Change(
                overrides=(f"moments={moments}",),
                plan=best,
                peak_bytes=memory_of(best, graph, machine).peak_bytes,
                cost=cost,
            )


def _pins(request: Request, machine: Machine) -> Iterator[str]:
    """What the request holds fixed and could let go to save memory."""
    if request.batch.micro is not None or request.batch.accumulation is not None:
        yield "batch"
    if request.recompute == "none":
        yield "recompute"
    if request.precision is not None and len(precisions(machine)) > 1:
        yield "precision"
    if request.compile is not None:
        yield "compile"


def _without(request: Request, pins: Sequence[str]) -> Request:
    changes: dict[str, object] = dict.fromkeys(pins)
    if "batch" in changes:
        changes["batch"] = BatchRequest()
    return request.model_copy(update=changes)


def _shorter(request: Request, graph: Graph, machine: Machine, near_bytes: int) -> tuple[Plan, ...]:
    """The plans of the longest halved sequence that fit."""
    sequence = sequence_of(request, graph) // 2
    while sequence >= _SHORTEST:
        shorter = [
            vary(plan, sequence=sequence)
            for plan in plans(request, graph, machine)
            if sequence % plan.cut.tensor == 0  # slices hold as many tokens each
        ]
        fitting = sieve(shorter, graph, machine, near_bytes).fitting
        if fitting:
            return fitting
        sequence //= 2
    return ()


def _cheapest(
    fitting: Sequence[Plan], graph: Graph, machine: Machine, base: float, near_bytes: int
) -> tuple[Plan, float]:
    """The fastest of the plans that fit, and by how much slower than `base` seconds a token."""
    seconds, index = min(
        (_seconds_per_token(plan, graph, machine, near_bytes), index)
        for index, plan in enumerate(fitting)
    )
    return fitting[index], seconds / base - 1


def _change(
    request: Request, freed: Sequence[str], plan: Plan, cost: float, graph: Graph, machine: Machine
) -> Change:
    """The plan's values for the pins let go; what was open stays open."""
    overrides: list[str] = []
    if "batch" in freed and request.batch.micro is not None:
        overrides.append(f"batch.micro={plan.batch.micro}")
    if "batch" in freed and request.batch.accumulation is not None:
        overrides.append(f"batch.accumulation={plan.batch.accumulation}")
    if "recompute" in freed:
        overrides.append(f"recompute={plan.recompute}")
    if "precision" in freed:
        overrides.append(f"precision={plan.precision}")
    if "compile" in freed:
        overrides.append(f"compile={str(plan.compile).lower()}")
    if plan.batch.sequence != sequence_of(request, graph):
        overrides.append(f"train.sequence={plan.batch.sequence}")
    return Change(
        overrides=tuple(overrides),
        plan=plan,
        peak_bytes=memory_of(plan, graph, machine).peak_bytes,
        cost=cost,
    )


def _seconds_per_token(plan: Plan, graph: Graph, machine: Machine, near_bytes: int) -> float:
    prediction = weigh(plan, graph, machine, near_bytes=near_bytes)
    return prediction.step_seconds / prediction.tokens_per_step
