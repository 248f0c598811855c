"""Ways: plans of different kinds that fit a budget, as what to add to the command line."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from windlass.search.choice import Change
from windlass.search.sieve import sieve
from windlass.search.space import plans
from windlass.search.streamed import streamed_plans
from windlass.search.weigh import holdable, memory_of, weigh
from windlass.spec.graph import Graph
from windlass.spec.machine import Machine
from windlass.spec.plan import Plan, Recompute
from windlass.spec.request import BatchRequest, Request

_FREED: tuple[dict[str, object], ...] = (
    {},
    {"batch": BatchRequest()},
    {"batch": BatchRequest(), "precision": None, "compile": None},
)
"""What of the request is let go to make a way fit, as little as does."""

_KEPT: tuple[Recompute, ...] = ("none", "layer")


def ways(
    request: Request,
    graph: Graph,
    machine: Machine,
    near_bytes: int,
    *,
    base: float,
    count: int,
    beside: Sequence[Change] = (),
) -> tuple[Change, ...]:
    """Changes that make a request fit: a smaller micro-batch, recompute, phases; then more phases.

    The fastest plan of each kind that the others do not already name, so that at least `count`
    plans are named together with `beside`, where so many fit.

    Args:
        request: what was asked.
        graph: captured from the request's model.
        machine: asked for.
        near_bytes: of the near tier.
        base: predicted seconds a token that a change's cost is told against.
        count: how many are wanted.
        beside: changes that are named already.

    Returns:
        The changes, cheapest first; no more than one of each kind beyond `count`.
    """
    known = [change.plan for change in beside]
    kinds = [list(kind) for kind in _kinds(request, graph, machine, near_bytes)]
    first = [kind[0] for kind in kinds if kind and not _named(kind, known)]
    taken = first[: max(0, count - len(known))]
    phased = next((each for each in first if each[1].streamed and each not in taken), None)
    if phased is not None:
        taken.append(phased)
    for each in (each for kind in reversed(kinds) for each in kind):
        if len(known) + len(taken) >= count:
            break
        if each not in taken and each[1] not in known:
            taken.append(each)
    return tuple(
        Change(
            overrides=tuple(_overrides(request, freed, plan)),
            plan=plan,
            peak_bytes=memory_of(plan, graph, machine).peak_bytes,
            cost=seconds / base - 1,
        )
        for seconds, plan, freed in sorted(taken, key=lambda item: item[0])
    )


_Way = tuple[float, Plan, tuple[str, ...]]
"""Predicted seconds a token, the plan, and what of the request was let go for it."""


def _kinds(
    request: Request, graph: Graph, machine: Machine, near_bytes: int
) -> Iterator[Iterable[_Way]]:
    """For each kind of plan those that fit, fastest first: by recompute, and in phases."""
    for recompute in _KEPT:
        kept = request.model_copy(update={"recompute": recompute, "phases": None})
        yield _fitting(kept, graph, machine, near_bytes, phased=False)
    turns = request.model_copy(update={"recompute": None, "phases": None})
    by_count = sorted(
        _fitting(turns, graph, machine, near_bytes, phased=True),
        key=lambda way: (_phases(way), way[0]),
    )
    best = (next(ways) for _, ways in groupby(by_count, key=_phases))
    yield sorted(best, key=lambda way: way[0])


def _fitting(
    request: Request, graph: Graph, machine: Machine, near_bytes: int, *, phased: bool
) -> list[_Way]:
    """The plans that fit with as little let go as does, fastest first.

    Of those that differ only in what the planner will choose again, the fastest.
    """
    for freed in _FREED:
        asked = request.model_copy(update=freed)
        found = (
            streamed_plans(asked, graph, machine)
            if phased
            else holdable(plans(asked, graph, machine), graph, near_bytes)
        )
        fitting = sieve(found, graph, machine, near_bytes).fitting
        if fitting:
            weighed = (
                (_seconds_per_token(plan, graph, machine, near_bytes), plan, tuple(freed))
                for plan in fitting
            )
            best: dict[tuple[str, ...], _Way] = {}
            for way in sorted(weighed, key=lambda way: way[0]):
                best.setdefault(tuple(_overrides(asked, way[2], way[1])), way)
            return list(best.values())
    return []


def _named(kind: Sequence[_Way], known: Sequence[Plan]) -> bool:
    """Whether a plan of this kind is named already."""
    like = kind[0][1]
    return any(
        plan.streamed == like.streamed and (plan.streamed or plan.recompute == like.recompute)
        for plan in known
    )


def _overrides(request: Request, freed: Sequence[str], plan: Plan) -> Iterator[str]:
    """The plan's values for what makes it of its kind, and for what was let go."""
    if plan.streamed:
        yield f"phases={len(plan.stages[0].phases)}"
    elif request.phases not in (None, 1):
        yield "phases=1"
    yield f"batch.micro={plan.batch.micro}"
    if "batch" in freed and request.batch.accumulation is not None:
        yield f"batch.accumulation={plan.batch.accumulation}"
    if not plan.streamed:
        yield f"recompute={plan.recompute}"
    if "precision" in freed and request.precision is not None:
        yield f"precision={plan.precision}"
    if "compile" in freed and request.compile is not None:
        yield f"compile={str(plan.compile).lower()}"


def _phases(way: _Way) -> int:
    return len(way[1].stages[0].phases)


def _seconds_per_token(plan: Plan, graph: Graph, machine: Machine, near_bytes: int) -> float:
    prediction = weigh(plan, graph, machine, near_bytes=near_bytes)
    return prediction.step_seconds / prediction.tokens_per_step
