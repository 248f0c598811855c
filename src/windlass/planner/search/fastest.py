"""The fastest plans of a request that fit: in device memory, with offloaded state, or in phases."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

from windlass.cost import ArrayClock
from windlass.planner.result import EvaluatedPlan, run_seconds
from windlass.planner.search.best_first import BestFirst
from windlass.planner.search.bounds import ConfigBounds
from windlass.planner.search.evaluate import evaluate
from windlass.planner.search.phase_bounds import PhasePrices
from windlass.planner.search.phase_search import PhaseSearch
from windlass.planner.search.search_result import SearchResult, run_rank
from windlass.planner.space.pins import broken_pins, excludes_phases
from windlass.planner.space.plan_space import PlanSpace
from windlass.program import plan_errors
from windlass.schema import Plan


class Findings:
    """What searches of one model on one machine have found, for the next ones to begin from.

    Neither prices of passes nor how plans are cut depend on what a request leaves open, its global
    batch for example.
    """

    def __init__(self) -> None:
        self._prices: dict[tuple[object, ...], tuple[ArrayClock, PhasePrices]] = {}
        self._plans: dict[tuple[object, ...], list[Plan]] = {}

    def prices(self, space: PlanSpace) -> tuple[ArrayClock, PhasePrices]:
        """The clock of a space, and prices of its plans in phases."""
        key = _findings_key(space)
        if key not in self._prices:
            clock = ArrayClock(space.base, space.graph, space.machine)
            self._prices[key] = clock, PhasePrices(clock)
        return self._prices[key]

    def keep(self, space: PlanSpace, plan: Plan) -> None:
        """Keeps the fastest plan of a space."""
        self._plans.setdefault(_findings_key(space), []).append(plan)

    def fitting(self, space: PlanSpace, budget_bytes: int) -> EvaluatedPlan | None:
        """The plan found last with as many micro-batches as a space asks for, if it fits there."""
        batch = space.request.train.batch
        for plan in self._plans.get(_findings_key(space), [])[-1:]:
            rows = plan.batch.micro * plan.parallel.data
            own = plan.batch.model_copy(update={"accumulation": batch // rows})
            like = plan.model_copy(update={"batch": own})
            is_other = plan.global_batch != batch and not batch % rows
            is_open = is_other and not any(broken_pins(space.request, like))
            if is_open and not plan_errors(like, space.graph, space.machine):
                found = evaluate(
                    like, self.prices(space)[0], budget_bytes=budget_bytes,
                    kept_code=space.kept_code,
                )  # fmt: skip
                return (like, found) if found.fits else None
        return None


def _findings_key(space: PlanSpace) -> tuple[object, ...]:
    return space.base, space.graph.label, tuple(space.graph.tensor_shards), space.machine.label


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
    phases: PhaseSearch
    """The search for plans in phases."""
    findings: Findings
    """What this search has found, for others."""

    @property
    def clock(self) -> ArrayClock:
        """What priced them, and prices others of the same model and machine."""
        return self.bounds.clock


def fastest_plans(
    space: PlanSpace,
    budget_bytes: int,
    *,
    findings: Findings | None = None,
    known: FastestPlans | None = None,
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
        findings: of other searches of the same model and machine; None makes new ones.
        known: those of this space under a larger budget; None searches anew.
        where: looks among plans without phases, or with them, only; None looks among all.
        most: plans without phases that are wanted, each proved the next fastest.
        keeps_smallest: whether the smallest plans are wanted where none fits without phases.
        below_seconds: seconds of a step, with its share of the compilation, of a plan that fits
            without phases; only faster ones are looked for.
    """
    request, result, evaluated = space.request, SearchResult(), 0
    findings, steps = findings or Findings(), request.train.steps
    if known is None:
        clock, prices = findings.prices(space)
        bounds, phases = ConfigBounds(space, clock, budget_bytes), PhaseSearch(space, prices)
    else:
        bounds, phases = known.bounds.with_budget(budget_bytes), known.phases
    like = findings.fitting(space, budget_bytes) if where is None else None
    best = [] if like is None else [like]
    search = BestFirst(space, budget_bytes, bounds)
    if request.phases in (None, 1) and where != "phases":
        result = search.search(most, below_seconds=_fastest(best, steps, below_seconds))
        best += result.best
        if keeps_smallest and not best:
            search.look_at_smallest(result)
        evaluated = result.priced
    below = _fastest(best, steps, below_seconds)
    if where == "phases" or (where is None and _tries_phases(space, found=below < inf)):
        in_phases = phases.search(budget_bytes, bounds, below_seconds=below)
        best += in_phases.best
        evaluated += in_phases.evaluated
    best = sorted(dict(best).items(), key=lambda item: run_rank(item, steps))
    if best and where is None:
        findings.keep(space, best[0][0])
    return FastestPlans(
        best=tuple(best),
        in_memory=result,
        evaluated=evaluated,
        bounds=bounds,
        phases=phases,
        findings=findings,
    )


def _fastest(plans: Sequence[EvaluatedPlan], steps: int, below_seconds: float) -> float:
    """Seconds of a step, with its share of the compilation, of the fastest plan that is known."""
    return min((run_seconds(each, steps) / steps for _, each in plans), default=below_seconds)


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
