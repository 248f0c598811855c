"""Rank of a plan that the request pins among all plans that it could have left open."""

from dataclasses import replace

from windlass.planner.result import PinnedRank, PlanningResult, runner_up
from windlass.planner.search.branch_and_bound import BranchAndBound
from windlass.planner.search.extrapolate import EvaluatedPlan, extrapolate, with_budget
from windlass.planner.space.plan_space import PlanSpace
from windlass.schema import (
    BatchRequest,
    OffloadRequest,
    ParallelRequest,
    ResolvedRequest,
    ShardingRequest,
)


def rank_of_pinned_plan(
    space: PlanSpace, chosen: EvaluatedPlan, budget_bytes: int
) -> PinnedRank | None:
    """How many plans are faster, which is the fastest, and why; None if nothing was pinned.

    Args:
        space: what the request leaves open.
        chosen: the plan that it led to, with its prediction.
        budget_bytes: device memory budget.
    """
    request = without_pins(space.request)
    if request == space.request:
        return None
    plan, prediction = chosen
    steps = request.train.steps
    seconds = prediction.step_seconds + prediction.compile_seconds / steps
    open_space = replace(space, request=request)
    search = BranchAndBound(open_space, budget_bytes)
    result = search.faster(seconds)
    for candidate in result.best:
        other = open_space.plan(candidate.batch, candidate.row)
        other_prediction = with_budget(extrapolate(other, space.graph, space.machine), budget_bytes)
        if other_prediction.fits and other != plan:
            return PinnedRank(
                faster=result.faster,
                compared=result.evaluated + result.pruned,
                best=runner_up((other, other_prediction), chosen, steps),
                plan=other,
            )
    return PinnedRank(faster=0, compared=result.evaluated + result.pruned, best=None, plan=None)


def rank_in_phases(chosen: EvaluatedPlan, unpinned: PlanningResult, steps: int) -> PinnedRank:
    """Rank of a plan in phases among the best plans of the same request without its pins.

    Args:
        chosen: the plan that the pins led to, with its prediction.
        unpinned: result for the request without its pins.
        steps: steps of the run.
    """
    if unpinned.plan is not None and unpinned.prediction is not None:
        predictions = (unpinned.prediction, *(runner.prediction for runner in unpinned.runners_up))
        faster = sum(each.step_seconds < chosen[1].step_seconds for each in predictions)
        if faster and unpinned.plan != chosen[0]:
            return PinnedRank(
                faster=faster,
                compared=unpinned.evaluated,
                plan=unpinned.plan,
                best=runner_up((unpinned.plan, unpinned.prediction), chosen, steps),
            )
    return PinnedRank(faster=0, compared=unpinned.evaluated, plan=None, best=None)


def without_pins(request: ResolvedRequest) -> ResolvedRequest:
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
