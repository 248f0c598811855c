"""The plan to queue: the fastest that leaves a margin of memory, also if links are slower.

The proved fastest plan may fill device memory to the last percent, or lead by so little that a link
5 % slower turns the order round. The plan to queue has a peak whose whole 80 % interval leaves the
margin. Of the fastest such plan and its runners-up within the margin, it is the one whose run ends
first on links that are slower by the margin. No other plan gains more there than what slower links
add to the fastest one: the margin's share of the communication that it waits for.
"""

from collections.abc import Sequence
from math import inf

from windlass.cost import ArrayClock
from windlass.planner.result import EvaluatedPlan, run_seconds, with_budget
from windlass.planner.search.evaluate import evaluate
from windlass.planner.search.fastest import FastestPlans, fastest_plans
from windlass.planner.space.plan_space import PlanSpace


def plan_to_queue(
    space: PlanSpace,
    fastest: FastestPlans,
    rivals: Sequence[EvaluatedPlan],
    budget_bytes: int,
    margin: float,
) -> EvaluatedPlan:
    """The plan to queue; the proved fastest where no plan leaves the margin, or none is asked.

    Args:
        fastest: the fastest plans, of which at least one fits.
        rivals: other plans that fit, each the fastest of its kind.
        budget_bytes: device memory budget of `fastest`.
        margin: share of device memory to leave free, and by which links may be slower; 0 asks for
            the proved fastest.
    """
    best = fastest.best[0]
    if not margin:
        return best
    roomy_bytes = _roomy_bytes(space, best, margin)
    safe = [item for item in (best, *rivals) if item[1].peaks[0].peak_bytes <= roomy_bytes]
    if best not in safe:
        steps = space.request.train.steps
        # Only what is faster than the runners-up that leave the margin is looked for.
        below = min((run_seconds(each, steps) / steps for _, each in safe), default=inf)
        found = fastest_plans(
            space, min(budget_bytes, roomy_bytes), known=fastest, below_seconds=below
        ).best
        capacity_bytes = best[1].peaks[0].capacity_bytes
        safe += [(plan, with_budget(each, capacity_bytes)) for plan, each in found[:1]]
        safe.sort(key=lambda item: run_seconds(item[1], steps))
    return _least_on_slower_links(space, safe, margin) if safe else best


def _roomy_bytes(space: PlanSpace, best: EvaluatedPlan, margin: float) -> int:
    """The largest peak whose interval leaves the margin of a device's memory.

    A budget that the request names is the user's own, so nothing more is left of it.
    """
    memory = space.request.memory or space.machine.budget_bytes * (1 - margin)
    return int(memory / (1 + best[1].peaks[0].error))


def _least_on_slower_links(
    space: PlanSpace, safe: Sequence[EvaluatedPlan], margin: float
) -> EvaluatedPlan:
    """The plan within the margin of the fastest that slower links delay least."""
    steps = space.request.train.steps
    limit = min(run_seconds(prediction, steps) for _, prediction in safe) * (1 + margin)
    near = [item for item in safe if run_seconds(item[1], steps) <= limit]
    links = tuple(
        link.model_copy(update={"rate": link.rate / (1 + margin)}) for link in space.machine.links
    )
    if len(near) == 1 or not links:
        return near[0]
    slower = space.machine.model_copy(update={"links": links})
    clock = ArrayClock(space.base, space.graph, slower)

    def seconds(item: EvaluatedPlan) -> float:
        capacity_bytes = item[1].peaks[0].capacity_bytes
        prediction = evaluate(
            item[0], clock, budget_bytes=capacity_bytes, kept_code=space.kept_code
        )
        return run_seconds(prediction, steps)

    return min(near, key=seconds)
