"""The fastest plans of a request that fit: in device memory, with offloaded state, or in phases."""

from dataclasses import dataclass
from math import inf
from typing import Literal

from windlass.cost import ArrayClock
from windlass.planner.result import EvaluatedPlan, run_seconds
from windlass.planner.search.best_first import BestFirst
from windlass.planner.search.bounds import ConfigBounds
from windlass.planner.search.phase_search import search_phases
from windlass.planner.search.search_result import SearchResult, run_rank
from windlass.planner.space.pins import excludes_phases
from windlass.planner.space.plan_space import PlanSpace


@dataclass(frozen=True, slots=True, kw_only=True)
class FastestPlans:
    """What the searches in memory and in phases found."""

    best: tuple[EvaluatedPlan, ...]
    """Plans that fit, the fastest run first; the first is the fastest of all."""
    in_memory: SearchResult
    evaluated: int
    """Plans that bounds did not rule out."""
    bounds: ConfigBounds
    """Lower bounds on all configurations of the space."""

    @property
    def clock(self) -> ArrayClock:
        """What priced them, and prices others of the same model and machine."""
        return self.bounds.clock


def fastest_plans(
    space: PlanSpace,
    budget_bytes: int,
    *,
    clock: ArrayClock | None = None,
    bounds: ConfigBounds | None = None,
    where: Literal["memory", "phases"] | None = None,
    most: int = 1,
    keeps_smallest: bool = False,
    below_seconds: float = inf,
) -> FastestPlans:
    """The fastest plans that fit, of all that are open.

    Phases are tried wherever they may be faster.

    Args:
        space: what is open.
        budget_bytes: device memory budget.
        clock: prices plans of the same model and machine; None makes one.
        bounds: those of this space under another budget; None makes new ones.
        where: looks among plans without phases, or with them, only; None looks among all.
        most: plans without phases that are wanted, each proved the next fastest.
        keeps_smallest: whether the smallest plans are wanted where none fits without phases.
        below_seconds: seconds of a step, with its share of the compilation, of a plan that fits
            without phases; only faster ones are looked for.
    """
    request, result, evaluated = space.request, SearchResult(), 0
    if bounds is None:
        clock = clock or ArrayClock(space.base, space.graph, space.machine)
        bounds = ConfigBounds(space, clock, budget_bytes)
    search = BestFirst(space, budget_bytes, bounds)
    if request.phases in (None, 1) and where != "phases":
        result = search.search(most, below_seconds=below_seconds)
        if keeps_smallest and not result.best:
            search.look_at_smallest(result)
        evaluated = result.priced
    best = list(result.best)
    found = bool(best) or below_seconds < inf
    if where == "phases" or (where is None and _tries_phases(space, found=found)):
        steps = request.train.steps
        below = run_seconds(best[0][1], steps) / steps if best else below_seconds
        in_phases = search_phases(space, budget_bytes, search.bounds, below_seconds=below)
        best += in_phases.best
        evaluated += in_phases.evaluated
        best.sort(key=lambda item: run_rank(item, steps))
    return FastestPlans(
        best=tuple(best), in_memory=result, evaluated=evaluated, bounds=search.bounds
    )


def _tries_phases(space: PlanSpace, *, found: bool) -> bool:
    """Whether plans in phases are to be tried.

    In phases all layers but those of the last phase are recomputed. So if the request pins
    recompute, phases are tried only when nothing fits without them.
    """
    request = space.request
    if excludes_phases(request):
        return False
    pinned = request.recompute is not None or request.recompute_layers is not None
    return request.phases is not None or not (found and pinned)
