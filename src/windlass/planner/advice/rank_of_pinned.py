"""Rank of a plan that the request pins among all plans that it could have left open."""

from windlass.planner.result import PinnedRank, runner_up
from windlass.planner.search.branch_and_bound import BranchAndBound
from windlass.planner.search.extrapolate import extrapolate, with_budget
from windlass.planner.space.plan_space import PlanSpace
from windlass.schema.plan import Plan
from windlass.schema.prediction import Prediction
from windlass.schema.request import (
    BatchRequest,
    OffloadRequest,
    ParallelRequest,
    Request,
    ShardingRequest,
)


def rank_of_pinned_plan(
    field: PlanSpace, chosen: tuple[Plan, Prediction], budget_bytes: int
) -> PinnedRank | None:
    """How many plans are faster, which is the fastest, and why; None if nothing was pinned.

    Args:
        field: what the request leaves open.
        chosen: the plan that it led to, with its prediction.
        budget_bytes: device memory budget.
    """
    request = without_pins(field.request)
    if request == field.request:
        return None
    plan, prediction = chosen
    steps = request.train.steps
    seconds = prediction.step_seconds + prediction.compile_seconds / steps
    open_space = PlanSpace(request, field.graph, field.machine)
    search = BranchAndBound(open_space, budget_bytes)
    result = search.faster(seconds)
    for candidate in result.best:
        other = open_space.plan(candidate.batch, candidate.row)
        other_prediction = with_budget(extrapolate(other, field.graph, field.machine), budget_bytes)
        if other_prediction.fits and other != plan:
            return PinnedRank(
                faster=result.faster,
                compared=result.evaluated + result.pruned,
                best=runner_up((other, other_prediction), chosen, steps),
                plan=other,
            )
    return PinnedRank(faster=0, compared=result.evaluated + result.pruned, best=None, plan=None)


def without_pins(request: Request) -> Request:
    """The request without what it pins of a plan; batch size, precision and mode stay."""
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
