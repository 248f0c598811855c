"""Minimal fix: the cheapest single change that makes an infeasible plan fit."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from windlass.cost import LayerCosts
from windlass.planner.advice.alternatives import is_requestable
from windlass.planner.recompute_layers import recompute_layers, show_recompute_layers
from windlass.planner.result import Change
from windlass.planner.search.branch_and_bound import BranchAndBound
from windlass.planner.search.extrapolate import evaluate
from windlass.planner.search.top_k import Candidate
from windlass.planner.single_device import search_single_device
from windlass.planner.space.plan_space import PlanSpace
from windlass.schema import (
    BatchRequest,
    Graph,
    Machine,
    OffloadRequest,
    ParallelRequest,
    Plan,
    ResolvedRequest,
    ShardingRequest,
)

_OPENED: Mapping[str, tuple[str, ...]] = {
    "recompute": ("recompute", "recompute_layers"),
    "batch": ("batch.micro", "batch.accumulation"),
    "sharding": ("sharding.parameters", "sharding.optimizer"),
    "offload": ("offload.optimizer",),
    "parallel": ("parallel.pipeline", "parallel.tensor", "parallel.data", "batch.accumulation"),
    "schedule": ("parallel.schedule", "parallel.virtual_stages"),
}
"""Parts of a plan on several devices that are opened together, and the keys that such a change
names."""

_OPENED_SINGLE_DEVICE: Mapping[str, tuple[str, ...]] = {
    "recompute": ("recompute", "recompute_layers"),
    "batch": ("batch.micro",),
    "offload": ("offload.optimizer",),
    "phases": ("phases",),
}
"""The same for a plan on one device."""


_PARALLEL_FIELDS: Mapping[str, tuple[str, ...]] = {
    "parallel": ("pipeline", "tensor", "data"),
    "schedule": ("schedule", "virtual_stages"),
}
"""Fields of `ResolvedRequest.parallel` that are opened together."""


class _FittingPlan(NamedTuple):
    """A plan that fits."""

    plan: Plan
    step_seconds: float
    peak_bytes: int


_Search = Callable[[ResolvedRequest], _FittingPlan | None]
"""Finds the fastest plan of a request that fits."""


def minimal_fix(
    space: PlanSpace, costs: LayerCosts, infeasible: Candidate, budget_bytes: float
) -> Change | None:
    """The cheapest change of one kind; None if no single change is enough.

    Args:
        space: space that the plan belongs to.
        costs: costs of its layers.
        infeasible: a plan that does not fit.
        budget_bytes: device memory budget.
    """

    def search(request: ResolvedRequest) -> _FittingPlan | None:
        open_space = replace(space, request=request)
        for candidate in BranchAndBound(open_space, budget_bytes, chain=costs).fastest(1).best:
            plan = open_space.plan(candidate.batch, candidate.row)
            # A request names one mode for all stages; the search may have mixed several.
            if open_space.minimizes_recompute and plan.recompute != "none":
                return search(request.model_copy(update=_requestable_recompute(plan)))
            return _FittingPlan(plan, candidate.step_seconds, int(candidate.peak_bytes))
        return None

    plan = space.plan(infeasible.batch, infeasible.row)
    changes = _changes(plan, infeasible.step_seconds, space.request, _OPENED, search)
    return min(changes, key=lambda change: change.cost, default=None)


def minimal_fix_single_device(
    plan: Plan, request: ResolvedRequest, graph: Graph, machine: Machine, budget_bytes: int
) -> Change | None:
    """The cheapest change of one kind for a plan on one device; None if no single change is enough.

    Args:
        plan: a plan that does not fit, with all layers on the device.
        request: the request that left it open.
        graph: the graph that it runs.
        machine: the machine that it is for.
        budget_bytes: device memory budget.
    """

    def search(request: ResolvedRequest) -> _FittingPlan | None:
        fitting = search_single_device(request, graph, machine, budget_bytes).fitting
        for plan, prediction in fitting:
            if is_requestable(plan):
                peak_bytes = prediction.peaks[0].peak_bytes
                return _FittingPlan(plan, prediction.step_seconds, peak_bytes)
        return None

    seconds = evaluate(plan, graph, machine, budget_bytes=budget_bytes).step_seconds
    changes = _changes(plan, seconds, request, _OPENED_SINGLE_DEVICE, search)
    return min(changes, key=lambda change: change.cost, default=None)


def _changes(
    plan: Plan,
    step_seconds: float,
    request: ResolvedRequest,
    opened: Mapping[str, tuple[str, ...]],
    search: _Search,
) -> Iterator[Change]:
    """The cheapest change of each kind, if one is enough."""
    before = _override_values(plan)
    for name, keys in opened.items():
        fitting = search(_pin_except(request, plan, name))
        if fitting is not None:
            after = _override_values(fitting.plan)
            changed = (key for key in keys if after[key] not in (None, before[key]))
            yield Change(
                overrides=tuple(f"{key}={_shown(after[key])}" for key in changed),
                plan=fitting.plan,
                peak_bytes=fitting.peak_bytes,
                cost=fitting.step_seconds / step_seconds - 1,
            )


def _pin_except(request: ResolvedRequest, plan: Plan, opened: str) -> ResolvedRequest:
    """The request with all of a plan pinned except what is opened."""
    pins: dict[str, object] = {
        "parallel": ParallelRequest(
            **{name: getattr(plan.parallel, name) for name in ParallelRequest.model_fields}
        ),
        "sharding": ShardingRequest(
            parameters=plan.sharding.parameters, optimizer=plan.sharding.optimizer
        ),
        "offload": OffloadRequest(optimizer=plan.offload.optimizer),
        "batch": BatchRequest(micro=plan.batch.micro, accumulation=plan.batch.accumulation),
        "recompute": plan.recompute,
        "recompute_layers": None,
        "precision": plan.precision,
        "compile": plan.compile,
        "phases": 1,
    }
    if opened in _PARALLEL_FIELDS:
        fields = {name: getattr(request.parallel, name) for name in _PARALLEL_FIELDS[opened]}
        own = {name: getattr(plan.parallel, name) for name in ParallelRequest.model_fields}
        pins["parallel"] = ParallelRequest(**own | fields)
    else:
        pins[opened] = getattr(request, opened)
    if opened == "recompute":
        pins["recompute_layers"] = request.recompute_layers
    if opened == "phases":  # all state is offloaded with the weights
        pins["offload"] = request.offload
    if opened == "parallel":  # the micro-batch stays; other replicas need another accumulation
        pins["batch"] = BatchRequest(micro=plan.batch.micro)
        pins["sharding"] = request.sharding
    return request.model_copy(update=pins)


def _override_values(plan: Plan) -> dict[str, object]:
    """A plan's values by request key; None if a request leaves the key out."""
    stage = plan.stages[0]
    return {
        "recompute": plan.recompute,
        "recompute_layers": recompute_layers(plan),
        "batch.micro": plan.batch.micro,
        "batch.accumulation": plan.batch.accumulation,
        "sharding.parameters": plan.sharding.parameters,
        "sharding.optimizer": plan.sharding.optimizer,
        "offload.optimizer": plan.offload.optimizer,
        "phases": len(stage.phases),
        "parallel.pipeline": plan.parallel.pipeline,
        "parallel.tensor": plan.parallel.tensor,
        "parallel.data": plan.parallel.data,
        "parallel.schedule": plan.parallel.schedule,
        "parallel.virtual_stages": plan.parallel.virtual_stages,
    }


def _requestable_recompute(plan: Plan) -> dict[str, object]:
    """Recompute as a request can name it, with no fewer layers recomputed than the plan has."""
    modes = {stage.recompute for stage in plan.stages} - {"none"}
    if len(modes) > 1 or any(stage.recompute_rest for stage in plan.stages):
        return {"recompute": "full", "recompute_layers": None}
    return {"recompute": plan.recompute, "recompute_layers": recompute_layers(plan)}


def _shown(value: object) -> str:
    return show_recompute_layers(value) if isinstance(value, tuple) else str(value)
