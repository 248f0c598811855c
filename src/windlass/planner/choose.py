"""Chooses the plan that fits and whose whole run is predicted to end first, and says why."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from math import inf

from windlass.cost import MEMORY_ERROR, KeptCode, PlanColumns
from windlass.errors import InputErrors
from windlass.planner.advice.advise import advise
from windlass.planner.advice.nearest_sayable import with_nearest
from windlass.planner.advice.no_legal_plan import no_legal_plan
from windlass.planner.advice.offload_feasibility import require_optimizer_tier, require_phases
from windlass.planner.advice.sensitivity import larger_batch, sensitivities
from windlass.planner.advice.shortfall import closest_in_phases
from windlass.planner.advice.single_changes import request_pins
from windlass.planner.plan_to_queue import plan_to_queue
from windlass.planner.result import (
    EvaluatedPlan,
    InfeasiblePlan,
    PinnedRank,
    PlanningResult,
    best_of_families,
    run_seconds,
    runner_up,
)
from windlass.planner.search.evaluate import evaluate, infeasible_plan
from windlass.planner.search.fastest import FastestPlans, Findings, fastest_plans
from windlass.planner.space.axes import explain_axes
from windlass.planner.space.options import (
    is_captured,
    request_faults,
    single_stage_faults,
    vary,
)
from windlass.planner.space.pins import (
    broken_pins,
    excludes_phases,
    single_device_faults,
    without_excluded_phases,
)
from windlass.planner.space.plan_space import PlanSpace
from windlass.program import plan_errors
from windlass.schema import (
    OWN_STACK,
    BatchRequest,
    Graph,
    Machine,
    OffloadRequest,
    ParallelRequest,
    Plan,
    ResolvedRequest,
    ShardingRequest,
    Stage,
)

_MAX_RIVALS = 8
"""Plans of other families that are simulated."""
_MAX_INFEASIBLE = 4


@contextmanager
def gc_paused() -> Iterator[None]:
    """Rests the garbage collector, unless it rests already.

    A search makes hundreds of thousands of small objects that live until it ends and form no
    reference cycles, so the collector scans all of them again and again and finds nothing: a tenth
    of the time of `windlass plan`.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def choose_plan(
    request: ResolvedRequest,
    graph: Graph,
    machine: Machine,
    *,
    every_grid: bool = False,
    kept_code: KeptCode = frozenset(),
    margin: float = 0.0,
) -> PlanningResult:
    """The result of `seek_plan`, or one with advice if nothing fits; its arguments are the same.

    Raises:
        InputErrors: the request asks for something impossible.
        PlanError: there is no plan at all.
    """
    found = seek_plan(
        request, graph, machine, every_grid=every_grid, kept_code=kept_code, margin=margin
    )
    return found.with_advice() if isinstance(found, NothingFits) else found


@gc_paused()
def seek_plan(
    request: ResolvedRequest,
    graph: Graph,
    machine: Machine,
    *,
    every_grid: bool = False,
    kept_code: KeptCode = frozenset(),
    margin: float = 0.0,
    explains: bool = True,
    findings: Findings | None = None,
) -> "PlanningResult | NothingFits":
    """Chooses the plan that ends the run first, and says why not another, if one fits.

    The run is `train.steps` steps and, if the plan compiles, the compilation before them.

    Args:
        request: what the user asks for; whatever it pins is kept.
        machine: to run on; `request.memory` replaces the capacity of its device memory.
        every_grid: whether the tensor-parallel grids that need least memory are open too, on
            several devices.
        kept_code: compiled code of the model that earlier runs have left on the machine.
        margin: as of `plan_to_queue`; 0 chooses the proved fastest plan.
        explains: whether to say why not another plan, and what would help the chosen one.
        findings: of other searches of the same model and machine; None makes new ones.

    Raises:
        InputErrors: the request asks for something impossible.
    """
    space, budget_bytes = _possible_space(request, graph, machine, every_grid, kept_code)
    fastest = fastest_plans(space, budget_bytes, findings=findings, keeps_smallest=True)
    if not fastest.best:
        return NothingFits(space, fastest, budget_bytes)
    return _fits(space, fastest, budget_bytes, margin, explains)


@dataclass(frozen=True)
class NothingFits:
    """A search in which no plan fits. Advice is made where it is asked for: it takes longer."""

    space: PlanSpace
    fastest: FastestPlans
    budget_bytes: int

    @gc_paused()
    def with_advice(self, *, looks_for_changes: bool = True) -> PlanningResult:
        """The result without a plan, and with advice.

        Args:
            looks_for_changes: whether to search for changes that would make it fit.

        Raises:
            PlanError: no plan is legal at all.
        """
        return _nothing_fits(self.space, self.fastest, self.budget_bytes, looks_for_changes)


def _possible_space(
    request: ResolvedRequest, graph: Graph, machine: Machine, every_grid: bool, kept_code: KeptCode
) -> tuple[PlanSpace, int]:
    """What is open, and the device memory budget."""
    request = without_excluded_phases(request, machine)
    space = PlanSpace(request, graph, machine, every_grid, kept_code=kept_code)
    _require_possible(space)
    budget_bytes = request.memory or machine.budget_bytes
    if request.memory and machine.system is not None:
        # On this machine a run must stay within what was asked, also where it takes more than is
        # predicted.
        budget_bytes = round(request.memory / (1 + MEMORY_ERROR))
    return space, budget_bytes


def _fits(
    space: PlanSpace, fastest: FastestPlans, budget_bytes: int, margin: float, explains: bool
) -> PlanningResult:
    """The result with the chosen plan, which keeps every pin."""
    steps = space.request.train.steps
    rivals = _runners_up(space, fastest, budget_bytes) if explains or margin else []
    best = plan_to_queue(space, fastest, rivals, budget_bytes, margin)
    result = PlanningResult(
        plan=best[0],
        prediction=best[1],
        run_seconds=run_seconds(best[1], steps),
        evaluated=fastest.evaluated,
    )
    if explains:
        result = _explained(result, space, fastest, best, rivals, budget_bytes)
    broken = () if result.plan is None else tuple(broken_pins(space.request, result.plan))
    if broken:  # Every pin is kept, or refused before the search: this is a bug of ours.
        words = ", ".join(f"`{key}` = {planned}, not {asked}" for key, asked, planned in broken)
        raise RuntimeError(f"the chosen plan breaks its request: {words}")
    return result


def _require_possible(space: PlanSpace) -> None:
    """Refuses what no plan can keep, all faults at once."""
    request, graph, machine = space.request, space.graph, space.machine
    if machine.devices > 1:
        faults = tuple(request_faults(request, graph, machine))
    else:
        faults = (
            *single_device_faults(request), *single_stage_faults(request, graph, machine)
        )  # fmt: skip
    if faults:
        raise InputErrors(with_nearest(faults, request, graph, machine))
    if machine.devices == 1:
        require_phases(space)
        require_optimizer_tier(space)


def _explained(
    result: PlanningResult,
    space: PlanSpace,
    fastest: FastestPlans,
    best: EvaluatedPlan,
    rivals: Sequence[EvaluatedPlan],
    budget_bytes: int,
) -> PlanningResult:
    """The result for the plan to queue, with runners-up, plans that do not fit, and advice."""
    steps, first = space.request.train.steps, fastest.best[0]
    plan, prediction = best
    seconds = run_seconds(prediction, steps)
    losers = [item for item in rivals if run_seconds(item[1], steps) >= seconds and item != best]
    in_phases = plan.is_offloaded("parameters")
    return replace(
        result,
        fastest=None if best == first else runner_up(best, first, steps),
        runners_up=tuple(runner_up(best, other, steps) for other in losers),
        infeasible=tuple(islice(_smallest(space, fastest, budget_bytes), _MAX_INFEASIBLE)),
        axes=explain_axes(space, _pinned_keys(space.request)),
        pinned_rank=_pinned_rank(space, fastest, budget_bytes),
        sensitivity={} if in_phases else sensitivities(fastest.clock, plan, prediction.by_term),
        larger_batch=larger_batch(space, best, fastest.clock),
    )


def _pinned_keys(request: ResolvedRequest) -> list[str]:
    """The keys of a plan that a request names."""
    return [key for key, _ in request_pins(request) if key != "train.batch"]


def _runners_up(space: PlanSpace, fastest: FastestPlans, budget_bytes: int) -> list[EvaluatedPlan]:
    """The fastest plan of each family that lost, and the chosen one in other numbers and modes."""
    best, known, steps = fastest.best[0][0], dict(fastest.best), space.request.train.steps
    ranked = [(run_seconds(prediction, steps) / steps, plan) for plan, prediction in fastest.best]
    ranked += [
        (seconds, space.plan(columns, row))
        for seconds, columns, row in fastest.in_memory.near.values()
    ]
    for twin in _twins(space, best):
        columns = PlanColumns.of((twin,))
        if (fastest.clock.least_bytes(columns) <= budget_bytes).all():
            ranked.append((float(fastest.clock.step_seconds(columns)[0]), twin))
    ranked.sort(key=lambda item: item[0])
    found: list[EvaluatedPlan] = []
    for plan in best_of_families(best, (plan for _, plan in ranked))[:_MAX_RIVALS]:
        prediction = known.get(plan) or evaluate(
            plan, fastest.clock, budget_bytes=budget_bytes, kept_code=space.kept_code
        )
        if prediction.fits:
            found.append((plan, prediction))
    return sorted(found, key=lambda item: run_seconds(item[1], steps))


def _twins(space: PlanSpace, best: Plan) -> Iterator[Plan]:
    """The plan in each other precision, compiled or not, and with all layers recomputed."""
    request, batch = space.request, best.batch
    if best.is_offloaded("parameters"):
        return
    twins = [vary(best, precision=each) for each in space.precisions if each != best.precision]
    if request.compile is None and len(space.compile_modes) > 1:
        twins.append(vary(best, compiled=not best.compile))
    if space.minimizes_recompute:
        twins.append(vary(best, recompute="full"))
    if request.batch.micro is None and request.batch.accumulation is None:
        sizes = (batch.micro * 2, batch.micro // 2)
        twins += [
            vary(best, micro=micro)
            for micro in sizes
            if micro and batch.sequences_per_replica % micro == 0
        ]
    for plan in twins:
        captured = is_captured(space.graph, plan.precision, compiled=plan.compile)
        if plan != best and captured and not plan_errors(plan, space.graph, space.machine):
            yield plan


def _pinned_rank(space: PlanSpace, fastest: FastestPlans, budget_bytes: int) -> PinnedRank | None:
    """The fastest plan without the request's pins; None if nothing is pinned."""
    request, chosen = without_pins(space.request), fastest.best[0]
    if request == space.request or space.machine.devices == 1:
        return None
    unpinned, steps = replace(space, request=request), request.train.steps
    seconds = run_seconds(chosen[1], steps) / steps
    found = fastest_plans(
        unpinned, budget_bytes, findings=fastest.findings, below_seconds=seconds
    ).best
    faster = [item for item in found if run_seconds(item[1], steps) / steps < seconds]
    faster = [item for item in faster if item[0] != chosen[0]]
    return PinnedRank(
        compared=unpinned.count(),
        plan=faster[0][0] if faster else None,
        best=runner_up(faster[0], chosen, steps) if faster else None,
    )


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


def _nothing_fits(
    space: PlanSpace, fastest: FastestPlans, budget_bytes: int, looks_for_changes: bool
) -> PlanningResult:
    """The result without a plan: what comes nearest, in phases or not, and what it would take."""
    closest = None if excludes_phases(space.request) else closest_in_phases(space, budget_bytes)
    infeasible = list(_smallest(space, fastest, budget_bytes))
    if closest is not None:
        nearest = infeasible_plan(closest.plan, space.graph, space.machine, budget_bytes)
        infeasible.append(replace(nearest, tiers=closest.short_tiers))
    if not infeasible:
        raise no_legal_plan(space, budget_bytes)
    infeasible.sort(key=lambda item: item.fullness(budget_bytes))
    if looks_for_changes and not infeasible[0].tiers:
        infeasible = [*_below(space, fastest, infeasible[0].peak_bytes, budget_bytes), *infeasible]
    return PlanningResult(
        plan=None,
        prediction=None,
        infeasible=tuple(infeasible),
        advice=advise(
            space, infeasible, budget_bytes, closest, looks_for_changes=looks_for_changes
        ),
        evaluated=fastest.evaluated + len(infeasible),
    )


def _below(
    space: PlanSpace, fastest: FastestPlans, peak_bytes: int, budget_bytes: int
) -> list[InfeasiblePlan]:
    """The plan with the smallest peak of all that are open, unless none is below a known one.

    A search proves that no plan is smaller. What it finds has as little recompute as its budget
    holds, so the same plan with other recompute is often smaller still.
    """
    found: list[InfeasiblePlan] = []
    graph, machine, request = space.graph, space.machine, space.request
    while best := fastest_plans(space, peak_bytes - 1, findings=fastest.findings).best:
        plan = best[0][0]
        stages = tuple(Stage(phases=stage.phases) for stage in plan.stages)
        bare = plan.model_copy(update={"stages": stages})
        alike = [vary(bare, recompute=mode) for mode in (machine.stack or OWN_STACK).can.recompute]
        smaller = [
            infeasible_plan(each, graph, machine, budget_bytes)
            for each in dict.fromkeys((plan, *alike))
            if not any(broken_pins(request, each)) and not plan_errors(each, graph, machine)
        ]
        found = [min(smaller, key=lambda each: each.peak_bytes)]
        peak_bytes = found[0].peak_bytes
    return found


def _smallest(
    space: PlanSpace, fastest: FastestPlans, budget_bytes: int
) -> Iterator[InfeasiblePlan]:
    """The smallest plans by their programs, as far as the clock's bytes leave it open."""
    misfits = sorted(fastest.in_memory.misfits.values(), key=lambda item: item[0])
    plans: set[Plan] = set()
    least = inf
    for nbytes, columns, row in misfits:
        plan = space.plan(columns, row)
        if len(plans) >= _MAX_INFEASIBLE and nbytes >= least:
            return
        if plan not in plans:
            plans.add(plan)
            item = infeasible_plan(plan, space.graph, space.machine, budget_bytes)
            least = min(least, item.peak_bytes)
            yield item
