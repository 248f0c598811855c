"""Lift: the cheapest single change that makes a plan fit which does not."""

from collections.abc import Mapping

from windlass.cost.closed_layers import Chain
from windlass.search.best import Found
from windlass.search.choice import Change
from windlass.search.field import Field
from windlass.search.sweep import Sweep
from windlass.spec.plan import Plan
from windlass.spec.request import BatchRequest, CutRequest, HomeRequest, Request, ShardingRequest

_FREED: Mapping[str, tuple[str, ...]] = {
    "recompute": ("recompute",),
    "batch": ("batch.micro", "batch.accumulation"),
    "sharding": ("sharding.weights", "sharding.optimizer"),
    "home": ("home.optimizer",),
    "cut": ("cut.pipeline", "cut.tensor", "cut.replicas", "batch.accumulation"),
    "order": ("order", "interleave"),
}
"""What is let go together, and what of it a change names."""


def lifted(field: Field, chain: Chain, found: Found, near_bytes: float) -> Change | None:
    """The change of one kind that costs least; None if no single one is enough.

    Args:
        field: that the plan is of.
        chain: with the prices of its layers.
        found: a plan that does not fit.
        near_bytes: of the near tier.
    """
    plan = field.plan(found.cell, found.place)
    changes = []
    for name, keys in _FREED.items():
        request = _pinned(field.request, plan, name)
        open_ = Field(request, field.graph, field.machine)
        swept = Sweep(open_, near_bytes, chain=chain).best(1)
        if swept.best:
            best = swept.best[0]
            other = open_.plan(best.cell, best.place)
            said = _said(other)
            told = tuple(f"{key}={said[key]}" for key in keys if said[key] != _said(plan)[key])
            cost = best.step_seconds / found.step_seconds - 1
            changes.append(
                Change(overrides=told, plan=other, peak_bytes=int(best.peak_bytes), cost=cost)
            )
    return min(changes, key=lambda change: change.cost, default=None)


def _pinned(request: Request, plan: Plan, freed: str) -> Request:
    """The request with all of a plan pinned but what is freed."""
    pins: dict[str, object] = {
        "cut": CutRequest(
            pipeline=plan.cut.pipeline, tensor=plan.cut.tensor, replicas=plan.cut.replicas
        ),
        "sharding": ShardingRequest(
            weights=plan.sharding.weights, optimizer=plan.sharding.optimizer
        ),
        "home": HomeRequest(optimizer=plan.home.optimizer),
        "batch": BatchRequest(micro=plan.batch.micro, accumulation=plan.batch.accumulation),
        "order": plan.order,
        "interleave": plan.interleave,
        "recompute": plan.recompute,
        "recomputed": None,
        "precision": plan.precision,
        "compile": plan.compile,
    }
    if freed == "order":
        pins["interleave"] = request.interleave
    pins[freed] = getattr(request, freed)
    if freed == "recompute" and request.recompute is None:
        pins[freed] = "layer"
    if freed == "cut":  # the micro-batch stays, and with other replicas comes another accumulation
        pins["batch"] = BatchRequest(micro=plan.batch.micro)
        pins["sharding"] = request.sharding
    return request.model_copy(update=pins)


def _said(plan: Plan) -> dict[str, object]:
    """What changes name, as a request writes it."""
    return {
        "recompute": plan.recompute,
        "batch.micro": plan.batch.micro,
        "batch.accumulation": plan.batch.accumulation,
        "sharding.weights": plan.sharding.weights,
        "sharding.optimizer": plan.sharding.optimizer,
        "home.optimizer": plan.home.optimizer,
        "cut.pipeline": plan.cut.pipeline,
        "cut.tensor": plan.cut.tensor,
        "cut.replicas": plan.cut.replicas,
        "order": plan.order,
        "interleave": plan.interleave,
    }
