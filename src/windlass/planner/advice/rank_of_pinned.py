"""Standing: where a plan that a request names stands among all that it could have left open."""

from windlass.planner.result import Standing, runner_up
from windlass.planner.search.branch_and_bound import Sweep
from windlass.planner.search.extrapolate import steady, with_near
from windlass.planner.space.plan_space import Field
from windlass.schema.plan import Plan
from windlass.schema.prediction import Prediction
from windlass.schema.request import (
    BatchRequest,
    OffloadRequest,
    ParallelRequest,
    Request,
    ShardingRequest,
)


def standing(field: Field, chosen: tuple[Plan, Prediction], near_bytes: int) -> Standing | None:
    """How many plans are faster, which is the fastest, and why; None if nothing was pinned.

    Args:
        field: what the request leaves open.
        chosen: the plan that it led to.
        near_bytes: of the near tier.
    """
    request = opened(field.request)
    if request == field.request:
        return None
    plan, prediction = chosen
    steps = request.train.steps
    seconds = prediction.step_seconds + prediction.compile_seconds / steps
    open_ = Field(request, field.graph, field.machine)
    sweep = Sweep(open_, near_bytes)
    swept = sweep.faster(seconds)
    for found in swept.best:
        other = open_.plan(found.cell, found.place)
        told = with_near(steady(other, field.graph, field.machine), near_bytes)
        if told.fits and other != plan:
            return Standing(
                faster=swept.faster,
                plans=swept.weighed + swept.skipped,
                best=runner_up((other, told), chosen, steps),
                plan=other,
            )
    return Standing(faster=0, plans=swept.weighed + swept.skipped, best=None, plan=None)


def opened(request: Request) -> Request:
    """The request without what it pins of a plan; its batch, precision and mode stay."""
    return request.model_copy(
        update={
            "parallel": ParallelRequest(),
            "sharding": ShardingRequest(),
            "offload": OffloadRequest(),
            "batch": BatchRequest(),
            "recompute": None,
            "recompute_layers": None,
        }
    )
