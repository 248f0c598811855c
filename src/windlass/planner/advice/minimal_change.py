"""Minimal fix: the cheapest single change that makes a plan fit."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from windlass.planner.recompute_layers import recompute_layers, show_recompute_layers
from windlass.planner.result import Change
from windlass.planner.search.extrapolate import EvaluatedPlan, evaluate
from windlass.planner.search.fastest import fastest_plans
from windlass.planner.space.plan_space import PlanSpace
from windlass.schema import (
    BatchRequest,
    OffloadRequest,
    ParallelRequest,
    Plan,
    ResolvedRequest,
    ShardingRequest,
)

_OPENED: Mapping[str, tuple[str, ...]] = {
    "recompute": ("recompute", "recompute_layers"),
    "batch": ("batch.micro", "batch.accumulation"),
    "offload": ("offload.optimizer",),
    "sharding": ("sharding.parameters", "sharding.optimizer"),
    "parallel": ("parallel.pipeline", "parallel.tensor", "parallel.data", "batch.accumulation"),
    "schedule": ("parallel.schedule", "parallel.virtual_stages"),
    "phases": ("phases",),
}
"""Parts of a plan that are opened together, and the keys that such a change names."""

_ELSEWHERE: Mapping[bool, tuple[str, ...]] = {
    True: ("sharding", "parallel", "schedule"),
    False: ("phases",),
}
"""Parts that are not opened, by whether the machine is a single device."""

_PARALLEL_FIELDS: Mapping[str, tuple[str, ...]] = {
    "parallel": ("pipeline", "tensor", "data"),
    "schedule": ("schedule", "virtual_stages"),
}
"""Fields of `ResolvedRequest.parallel` that are opened together."""


def minimal_fix(plan: Plan, space: PlanSpace, budget_bytes: int) -> Change | None:
    """The cheapest change of one kind; None if no single change is enough.

    Args:
        plan: a plan that does not fit, with all layers on the device.
        space: the space that it belongs to.
        budget_bytes: device memory budget.
    """
    prediction = evaluate(plan, space.graph, space.machine, budget_bytes=budget_bytes)
    changes = _changes(plan, prediction.step_seconds, space, budget_bytes)
    return min(changes, key=lambda change: change.cost, default=None)


def _changes(
    plan: Plan, step_seconds: float, space: PlanSpace, budget_bytes: int
) -> Iterator[Change]:
    """The cheapest change of each kind, if one is enough."""
    before, elsewhere = _override_values(plan), _ELSEWHERE[space.machine.devices == 1]
    for name, keys in _OPENED.items():
        if name in elsewhere:
            continue
        fitting = _fastest(
            replace(space, request=_pin_except(space.request, plan, name)), budget_bytes
        )
        if fitting is not None:
            after = _override_values(fitting[0])
            changed = (key for key in keys if after[key] not in (None, before[key]))
            yield Change(
                overrides=tuple(f"{key}={_shown(after[key])}" for key in changed),
                plan=fitting[0],
                peak_bytes=fitting[1].peaks[0].peak_bytes,
                cost=fitting[1].step_seconds / step_seconds - 1,
            )


def _fastest(space: PlanSpace, budget_bytes: int) -> EvaluatedPlan | None:
    """The fastest plan that fits and that a request can name; None if none is."""
    best = fastest_plans(space, budget_bytes).best
    if not best or not space.minimizes_recompute or best[0][0].recompute == "none":
        return best[0] if best else None
    if best[0][0].is_offloaded("parameters"):
        return best[0]
    # A request names one mode for all stages; the search may have mixed several.
    request = space.request.model_copy(update=requestable_recompute(best[0][0]))
    return _fastest(replace(space, request=request), budget_bytes)


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


def requestable_recompute(plan: Plan) -> dict[str, object]:
    """Recompute as a request can name it, with no fewer layers recomputed than the plan has."""
    modes = {stage.recompute for stage in plan.stages} - {"none"}
    if len(modes) > 1 or any(stage.recompute_rest for stage in plan.stages):
        return {"recompute": "full", "recompute_layers": None}
    return {"recompute": plan.recompute, "recompute_layers": recompute_layers(plan)}


def _shown(value: object) -> str:
    return show_recompute_layers(value) if isinstance(value, tuple) else str(value)
