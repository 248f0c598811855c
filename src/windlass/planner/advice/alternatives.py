"""Alternatives: plans of different kinds that fit a budget, as command-line overrides."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain, islice
from operator import attrgetter
from typing import Literal, NamedTuple

from windlass.planner.result import Change, EvaluatedPlan
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
        request: what was asked.
        graph: captured from the request's model.
        machine: the machine that was asked for.
        budget_bytes: device memory budget.
        base: predicted seconds a token against which a change's cost is stated.
        count: how many changes are wanted.

    Returns:
        The changes, cheapest first; no more than one of each kind beyond `count`.
    """
    search = _Search(request, graph, machine, budget_bytes)
    kinds = [*search.on_device(), search.optimizer_offloaded()]
    in_phases = search.in_phases()
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


class _Search:
    """Finds plans that fit with as few pins dropped as possible, fastest first."""

    def __init__(
        self, request: ResolvedRequest, graph: Graph, machine: Machine, budget_bytes: int
    ) -> None:
        unpinned = {"recompute": None, "recompute_layers": None, "phases": None}
        self._excludes_phases = bool(
            request.offload.optimizer or request.recompute_layers is not None
        )
        self._space = PlanSpace(request.model_copy(update=unpinned), graph, machine)
        self._budget_bytes = budget_bytes

    def on_device(self) -> Iterator[list[_Alternative]]:
        """Plans with everything on the device, for each recompute mode."""
        offload = OffloadRequest(optimizer=DEVICE_TIER)
        for mode in _RECOMPUTE_MODES:
            yield self._fewest_dropped({"offload": offload, "phases": 1}, mode)

    def optimizer_offloaded(self) -> list[_Alternative]:
        """Plans with offloaded optimizer state."""
        fitting: list[_Alternative] = []
        for tier in offload_tiers(self._space.machine):
            offload = OffloadRequest(optimizer=tier.name)
            fitting += self._fewest_dropped({"offload": offload, "phases": 1})
        return sorted(fitting, key=attrgetter("token_seconds"))

    def in_phases(self) -> Iterator[_Alternative]:
        """Plans in phases: in the fastest number of phases, then in more each time."""
        space = self._space
        if self._excludes_phases or not offload_tiers(space.machine):
            return
        fitting = self._fewest_dropped({})
        yield from fitting[:1]
        layers = space.graph.layers
        count = max((way.plan.phase_count for way in fitting), default=layers)
        while count < layers:
            count = min(2 * count, layers)
            yield from self._fewest_dropped({"phases": count})[:1]

    def _fewest_dropped(
        self, update: Mapping[str, object], mode: Recompute | None = None
    ) -> list[_Alternative]:
        """Plans that fit with the fewest pins dropped, fastest first."""
        for dropped in _DROPPED_PINS:
            request = self._space.request.model_copy(update={**dropped, **update})
            best: dict[tuple[str, ...], _Alternative] = {}
            for plan, prediction in self._fitting(request, mode):
                way = _Alternative(plan, prediction, tuple(dropped))
                if _is_requestable(plan):
                    best.setdefault(tuple(_overrides(request, way)), way)
            if best:
                return sorted(best.values(), key=attrgetter("token_seconds"))
        return []

    def _fitting(self, request: ResolvedRequest, mode: Recompute | None) -> list[EvaluatedPlan]:
        """Plans that fit, as far as a request can name them."""
        space = replace(self._space, request=request)
        if mode is not None:
            space = replace(space, recompute_within=tuple(dict.fromkeys(("none", mode))))
        where: Literal["memory", "phases"] = "memory" if request.phases == 1 else "phases"
        best = fastest_plans(space, self._budget_bytes, where=where, most=_MOST).best
        return [item for item in best if mode in (None, item[0].recompute)]


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


def _is_requestable(plan: Plan) -> bool:
    """Whether a request, which names one recompute mode, can ask for a plan's recompute."""
    return plan.stages[0].recompute_rest is None


def _recompute_overrides(plan: Plan, request: ResolvedRequest) -> Iterator[str]:
    """Overrides that ask for a plan's recompute, such as `recompute=full recompute_layers=5`.

    Args:
        plan: a plan of one device, `_is_requestable`.
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
