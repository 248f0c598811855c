"""Alternatives: plans of different kinds that fit a budget, as command-line overrides."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from operator import attrgetter
from typing import Literal, NamedTuple

from windlass.planner.result import Change
from windlass.planner.search.fastest import fastest_plans
from windlass.planner.space.options import offload_tiers, vary
from windlass.planner.space.plan_space import PlanSpace
from windlass.program import recomputable_layers
from windlass.schema import (
    DEVICE_TIER,
    BatchRequest,
    Graph,
    Machine,
    OffloadRequest,
    Plan,
    Prediction,
    Recompute,
    ResolvedRequest,
)

_DROPPED_PINS: tuple[dict[str, object], ...] = (
    {},
    {"batch": BatchRequest()},
    {"batch": BatchRequest(), "precision": None, "compile": None},
)
"""Pins of the request that are dropped to make an alternative fit, as few as possible."""

_MOST = 6
"""Plans without phases that are looked for in each search."""

_RECOMPUTE_MODES: tuple[Recompute, ...] = ("none", "selective", "full")


class _Alternative(NamedTuple):
    """A plan that fits, and which pins of the request were dropped for it."""

    plan: Plan
    prediction: Prediction
    dropped: tuple[str, ...]

    @property
    def token_seconds(self) -> float:
        """Predicted seconds a token."""
        return self.prediction.step_seconds / self.prediction.tokens_per_step


def alternatives(
    request: ResolvedRequest,
    graph: Graph,
    machine: Machine,
    budget_bytes: int,
    *,
    base: float,
    count: int,
) -> tuple[Change, ...]:
    """Changes that make a request fit: of micro-batch, recompute, optimizer offload or phases.

    Returns the fastest plan of each kind, and more of a kind if that is needed for `count` plans.

    Args:
        base: predicted seconds a token against which a change's cost is stated.

    Returns:
        The changes, cheapest first; no more than one of each kind beyond `count`.
    """
    unpinned = {"recompute": None, "recompute_layers": None, "phases": None}
    space = PlanSpace(request.model_copy(update=unpinned), graph, machine)
    fitting = partial(_fewest_dropped, space, budget_bytes)
    tiers = [tier.name for tier in offload_tiers(machine)]
    kinds = [fitting(_in_memory(DEVICE_TIER), mode) for mode in _RECOMPUTE_MODES]
    offloaded = chain(*(fitting(_in_memory(tier)) for tier in tiers))
    kinds.append(sorted(offloaded, key=attrgetter("token_seconds")))
    excludes_phases = request.offload.optimizer or request.recompute_layers is not None
    in_phases = iter(()) if excludes_phases or not tiers else _in_phases(fitting, graph.layers)
    chosen = sorted((kind[0] for kind in kinds if kind), key=attrgetter("token_seconds"))[:count]
    chosen += islice(in_phases, 1)
    for other in chain(in_phases, *reversed(kinds)):
        if len(chosen) >= count:
            break
        if other.plan not in [way.plan for way in chosen]:
            chosen.append(other)
    return tuple(
        Change(
            overrides=tuple(_overrides(request, way)),
            plan=_plan_of_overrides(request, way),
            peak_bytes=way.prediction.peaks[0].peak_bytes,
            cost=way.token_seconds / base - 1,
        )
        for way in sorted(chosen, key=attrgetter("token_seconds"))
    )


def _in_memory(optimizer: str) -> dict[str, object]:
    """Pins of plans without phases, with optimizer state in a tier."""
    return {"offload": OffloadRequest(optimizer=optimizer), "phases": 1}


def _in_phases(
    fitting: Callable[[Mapping[str, object]], list[_Alternative]], layers: int
) -> Iterator[_Alternative]:
    """Plans in phases: in the fastest number of phases, then in more each time."""
    fastest = fitting({})
    yield from fastest[:1]
    count = max((way.plan.phase_count for way in fastest), default=layers)
    while count < layers:
        count = min(2 * count, layers)
        yield from fitting({"phases": count})[:1]


def _fewest_dropped(
    space: PlanSpace,
    budget_bytes: int,
    update: Mapping[str, object],
    mode: Recompute | None = None,
) -> list[_Alternative]:
    """Plans that fit with the fewest pins dropped, as far as a request can name them."""
    if mode is not None:
        space = replace(space, recompute_within=tuple(dict.fromkeys(("none", mode))))
    where: Literal["memory", "phases"] = "memory" if update.get("phases") == 1 else "phases"
    for dropped in _DROPPED_PINS:
        request = space.request.model_copy(update={**dropped, **update})
        found = fastest_plans(
            replace(space, request=request), budget_bytes, where=where, most=_MOST
        )
        best: dict[tuple[str, ...], _Alternative] = {}
        for plan, prediction in found.best:
            way = _Alternative(plan, prediction, tuple(dropped))
            # A request names one recompute mode.
            if mode in (None, plan.recompute) and plan.stages[0].recompute_rest is None:
                best.setdefault(tuple(_overrides(request, way)), way)
        if best:
            return sorted(best.values(), key=attrgetter("token_seconds"))
    return []


def _overrides(request: ResolvedRequest, way: _Alternative) -> Iterator[str]:
    """The plan's values for what defines its kind, and for the pins that were dropped."""
    plan, dropped, in_phases = way.plan, way.dropped, way.plan.is_offloaded("parameters")
    if in_phases:
        yield f"phases={plan.phase_count}"
        if request.recompute in ("none", "selective"):  # phases recompute layers in full
            yield "recompute=full"
    elif request.phases not in (None, 1):
        yield "phases=1"
    if not in_phases and plan.offload.optimizer != (request.offload.optimizer or DEVICE_TIER):
        yield f"offload.optimizer={plan.offload.optimizer}"
    yield f"batch.micro={plan.batch.micro}"
    if "batch" in dropped and request.batch.accumulation is not None:
        yield f"batch.accumulation={plan.batch.accumulation}"
    if not in_phases:
        yield from _recompute_overrides(plan, request)
    if "precision" in dropped and request.precision is not None:
        yield f"precision={plan.precision}"
    if "compile" in dropped and request.compile is not None:
        yield f"compile={str(plan.compile).lower()}"


def _plan_of_overrides(request: ResolvedRequest, way: _Alternative) -> Plan:
    """The plan as its overrides ask for it: in phases they may name another recompute."""
    in_phases = way.plan.is_offloaded("parameters")
    pinned = request.recompute in ("none", "selective")
    return vary(way.plan, recompute="full") if in_phases and pinned else way.plan


def _recompute_overrides(plan: Plan, request: ResolvedRequest) -> Iterator[str]:
    """Overrides that ask for a plan's recompute, such as `recompute=full recompute_layers=5`.

    Args:
        plan: a plan of one device whose recompute a request can name.
        request: the request to which the overrides are added.
    """
    if plan.is_offloaded("parameters"):  # phases recompute layers in full, whatever the plan says
        yield "recompute=full"
        return
    yield f"recompute={plan.recompute}"
    layers = plan.stages[0].recompute_layers
    if layers is None and request.recompute_layers is not None:
        layers = len(recomputable_layers(plan, plan.stages[0]))
    if layers is not None:
        yield f"recompute_layers={layers}"
