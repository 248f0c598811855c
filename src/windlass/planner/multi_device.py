"""Chooses the plan for several devices, and says why not another.

The batched cost model finds the candidates. The event simulator decides among those whose
difference is within the model's error: their programs are lowered and simulated, and only plans
that fit by their programs are kept.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import ceil

from windlass.cost.peak_memory import tier_peaks
from windlass.errors import InputErrors, PlanError
from windlass.planner.advice.minimal_change import minimal_fix
from windlass.planner.advice.rank_of_pinned import rank_of_pinned_plan, without_pins
from windlass.planner.advice.sensitivity import sensitivities
from windlass.planner.advice.shortfall import shortfall
from windlass.planner.result import (
    Advice,
    InfeasiblePlan,
    PinnedRank,
    PlanningResult,
    infeasible_plan,
    runner_up,
)
from windlass.planner.search.branch_and_bound import BranchAndBound
from windlass.planner.search.extrapolate import (
    EvaluatedPlan,
    extrapolate,
    fullest_stage_memory,
    training_state_bytes,
    with_budget,
)
from windlass.planner.search.phase_search import PhaseSearchResult, search_phases
from windlass.planner.search.top_k import Candidate
from windlass.planner.space.options import excludes_phases
from windlass.planner.space.pinned_parallelism import pinned_plans
from windlass.planner.space.plan_space import PlanSpace
from windlass.program.lowering.lower import lower
from windlass.schema.graph import Graph
from windlass.schema.machine import Machine
from windlass.schema.plan import Plan, ShardingDegrees
from windlass.schema.prediction import Prediction
from windlass.schema.request import Request

_ESTIMATE_ERROR = 0.02
"""Largest relative difference between the batched estimate and the simulator."""

_CANDIDATE_GAP = (1 + _ESTIMATE_ERROR) / (1 - _ESTIMATE_ERROR) - 1
"""Largest relative gap to the best estimate at which the simulator may still rank a plan first."""

_MAX_SIMULATED = 48
"""Most plans that are simulated."""
_MAX_RUNNERS_UP = 6
_MAX_INFEASIBLE = 4
_FAMILIES = 24
"""Number of plan families from which runners-up are chosen."""


def choose_multi_device(request: Request, graph: Graph, machine: Machine) -> PlanningResult:
    """Chooses the plan that ends the run first on a machine of several devices.

    Args:
        request: what the user asks for; whatever it pins is kept.
        graph: captured from the request's model, sharded for the tensor-parallel degrees that are
            open.
        machine: to run on; `request.memory` replaces the capacity of its device memory.

    Raises:
        InputErrors: the request asks for something impossible.
        PlanError: there is no plan at all.
    """
    budget_bytes = request.memory or machine.device.memory.capacity_bytes
    field = PlanSpace(request, graph, machine)
    if request.phases is not None and request.phases > 1:
        return _best_in_phases(field, budget_bytes, ())
    sweep = BranchAndBound(field, budget_bytes)
    result = sweep.fastest(_MAX_SIMULATED, within=_CANDIDATE_GAP, families=_FAMILIES)
    if not result.evaluated and not result.pruned:
        pinned_plans(request, graph, machine)  # tells what is wrong with what is pinned
        raise InputErrors(("no plan is legal with what is pinned; leave something open",))
    simulated = _simulated(field, result.best, budget_bytes)
    if not simulated:
        return _best_in_phases(field, budget_bytes, sweep.smallest().infeasible)
    ranked = [item for item, _ in simulated]
    plan, extrapolated = ranked[0]
    runners_up = _distinct_runners_up(field, ranked, result.by_family, budget_bytes)
    refused = tuple(
        replace(
            _infeasible(field, candidate, budget_bytes),
            minimal_fix=minimal_fix(field, sweep.chain, candidate, budget_bytes),
        )
        for candidate in result.infeasible[:_MAX_INFEASIBLE]
    )
    best = (plan, _with_full_peak(plan, extrapolated, graph, machine, budget_bytes))
    choice = _result(field, best, runners_up, refused, weighed=result.evaluated + result.pruned)
    return replace(
        choice,
        pinned_rank=rank_of_pinned_plan(field, best, budget_bytes),
        sensitivity=sensitivities(field, simulated[0][1]),
    )


def _best_in_phases(
    field: PlanSpace, budget_bytes: int, misses: Sequence[Candidate]
) -> PlanningResult:
    """The result for the fastest plan in phases, where they are needed or asked for."""
    result = (
        PhaseSearchResult((), 0)
        if excludes_phases(field.request)
        else search_phases(field, budget_bytes)
    )
    refused = tuple(_infeasible(field, found, budget_bytes) for found in misses[:_MAX_INFEASIBLE])
    if not result.best:
        return _nothing_fits(field, refused, budget_bytes)
    best, others = result.best[0], result.best[1 : 1 + _MAX_RUNNERS_UP]
    planning_result = _result(field, best, others, refused, weighed=result.evaluated + len(misses))
    return replace(planning_result, pinned_rank=_among_turns(field, best))


def _among_turns(field: PlanSpace, chosen: EvaluatedPlan) -> PinnedRank | None:
    """Where a plan in phases stands among those that are found with nothing of it named."""
    request = without_pins(field.request)
    if request == field.request:
        return None
    other = choose_multi_device(request, field.graph, field.machine)
    if other.plan is None or other.prediction is None or other.plan == chosen[0]:
        return PinnedRank(faster=0, compared=other.evaluated, plan=None, best=None)
    steps = request.train.steps
    seconds = [other.prediction, *(runner.prediction for runner in other.runners_up)]
    faster = sum(each.step_seconds < chosen[1].step_seconds for each in seconds)
    if not faster:
        return PinnedRank(faster=0, compared=other.evaluated, plan=None, best=None)
    best = runner_up((other.plan, other.prediction), chosen, steps)
    return PinnedRank(faster=faster, compared=other.evaluated, plan=other.plan, best=best)


def _result(
    field: PlanSpace,
    best: EvaluatedPlan,
    others: Sequence[EvaluatedPlan],
    refused: tuple[InfeasiblePlan, ...],
    *,
    weighed: int,
) -> PlanningResult:
    plan, prediction = best
    steps = field.request.train.steps
    return PlanningResult(
        plan=plan,
        prediction=prediction,
        run_seconds=_run_seconds(best, steps),
        runners_up=tuple(runner_up(best, other, steps) for other in others),
        infeasible=refused,
        evaluated=weighed,
    )


def _simulated(
    field: PlanSpace, found: Sequence[Candidate], budget_bytes: int
) -> list[tuple[EvaluatedPlan, Candidate]]:
    """Candidates that fit, simulated, with their predictions, fastest first.

    A plan whose estimate exceeds the best known time by more than its error cannot be the fastest,
    so it is not simulated.
    """
    simulated: list[tuple[EvaluatedPlan, Candidate]] = []
    steps = field.request.train.steps
    fastest = float("inf")
    for candidate in found:
        if candidate.step_seconds * (1 - _ESTIMATE_ERROR) > fastest:
            continue
        item = _simulate(field, candidate, budget_bytes)
        if item[1].fits:
            simulated.append((item, candidate))
            fastest = min(fastest, _run_seconds(item, steps) / steps)
    return sorted(simulated, key=lambda both: _rank(both[0], steps))


def _simulate(field: PlanSpace, found: Candidate, budget_bytes: int) -> EvaluatedPlan:
    plan = field.plan(found.batch, found.row)
    return plan, with_budget(extrapolate(plan, field.graph, field.machine), budget_bytes)


def _distinct_runners_up(
    field: PlanSpace,
    ranked: Sequence[EvaluatedPlan],
    traits: Iterable[Candidate],
    budget_bytes: int,
) -> list[EvaluatedPlan]:
    """Runners-up that differ in something that matters, the fastest of each kind."""
    best, runners_up = ranked[0], list[EvaluatedPlan]()
    seen = {_distinguishing_traits(best[0])}
    for candidate in traits:
        plan = field.plan(candidate.batch, candidate.row)
        if _distinguishing_traits(plan) in seen:
            continue
        item = _simulate(field, candidate, budget_bytes)
        if item[1].fits:
            seen.add(_distinguishing_traits(plan))
            runners_up.append(item)
        if len(runners_up) == _MAX_RUNNERS_UP:
            break
    return sorted(runners_up, key=lambda item: item[1].step_seconds)


def _distinguishing_traits(plan: Plan) -> tuple[object, ...]:
    """What distinguishes plans in a list of runners-up."""
    sharded = (plan.sharding.parameters > 1, plan.sharding.optimizer > 1)
    parallel, tier = plan.parallel, plan.offload.optimizer
    return parallel.pipeline, parallel.tensor, plan.parallel.schedule, plan.recompute, sharded, tier


def _with_full_peak(
    plan: Plan, short: Prediction, graph: Graph, machine: Machine, budget_bytes: int
) -> Prediction:
    """The prediction with the peak memory of the full program, with all its micro-batches."""
    full = tier_peaks(plan, graph, machine, lower(plan, graph))
    return with_budget(short.model_copy(update={"peaks": full}), budget_bytes)


def _infeasible(field: PlanSpace, found: Candidate, budget_bytes: int) -> InfeasiblePlan:
    """The smallest plan of a family in which none fits, by its program."""
    plan = field.plan(found.batch, found.row)
    return infeasible_plan(
        plan, fullest_stage_memory(plan, field.graph, field.machine), budget_bytes
    )


def _nothing_fits(
    field: PlanSpace, refused: Sequence[InfeasiblePlan], budget_bytes: int
) -> PlanningResult:
    """The result without a plan: what comes nearest, in phases or not, and what it would take.

    Raises:
        PlanError: no plan is legal at all.
    """
    lacking = None if excludes_phases(field.request) else shortfall(field, budget_bytes)
    in_phases = (
        [] if lacking is None else [_infeasible_in_phases(lacking.plan, field, budget_bytes)]
    )
    nearest = sorted((*refused, *in_phases), key=lambda each: each.peak_bytes)
    if not nearest:
        raise PlanError(f"no plan for {field.machine.devices} devices of `{field.machine.name}`")
    first = nearest[0]
    process_bytes = field.machine.device.process_bytes(compiled=first.plan.compile)
    unsharded = first.plan.model_copy(update={"sharding": ShardingDegrees()})
    state = training_state_bytes(unsharded, field.graph) * first.plan.parallel.tensor
    free_bytes = budget_bytes - process_bytes
    return PlanningResult(
        plan=None,
        prediction=None,
        infeasible=tuple(nearest),
        advice=Advice(
            budget_bytes=budget_bytes,
            needed_bytes=first.peak_bytes,
            over_bytes=first.over_bytes,
            by_class=first.by_class,
            changes=(),
            state_bytes=state,
            tier_shortages=(),
            devices=ceil(state / free_bytes) if free_bytes > 0 else None,
            in_phases=() if lacking is None else lacking.sentences,
        ),
        evaluated=len(nearest),
    )


def _infeasible_in_phases(plan: Plan, field: PlanSpace, budget_bytes: int) -> InfeasiblePlan:
    memory = fullest_stage_memory(plan, field.graph, field.machine)
    return infeasible_plan(plan, memory, budget_bytes)


def _run_seconds(item: EvaluatedPlan, steps: int) -> float:
    return item[1].step_seconds * steps + item[1].compile_seconds


def _rank(item: EvaluatedPlan, steps: int) -> tuple[float, bool, int, int]:
    """Sort key: faster first; then no offload, less device memory, the larger micro-batch."""
    plan, prediction = item
    peak_bytes = prediction.peaks[0].peak_bytes
    return _run_seconds(item, steps), plan.offloads, peak_bytes, -plan.batch.micro
