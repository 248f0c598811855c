"""Chooses the plan for several devices, and says why not another.

The batched cost model finds the candidates. The event simulator decides among those whose
difference is within the model's error: their programs are lowered and simulated, and only plans
that fit by their programs are kept.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import ceil

from windlass.cost import tier_peaks
from windlass.errors import InputErrors, PlanError, WindlassError
from windlass.planner.advice.minimal_change import minimal_fix
from windlass.planner.advice.rank_of_pinned import rank_in_phases, rank_of_pinned_plan, without_pins
from windlass.planner.advice.sensitivity import sensitivities
from windlass.planner.advice.shortfall import shortfall
from windlass.planner.recompute_layers import show_recompute_layers
from windlass.planner.result import (
    Advice,
    InfeasiblePlan,
    PinnedRank,
    PlanningResult,
    best_of_families,
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
from windlass.planner.space.options import is_captured, vary
from windlass.planner.space.phase_space import offload_tiers
from windlass.planner.space.pinned_parallelism import pinned_plans
from windlass.planner.space.pins import excludes_phases
from windlass.planner.space.plan_space import PlanSpace
from windlass.program import lower, plan_errors
from windlass.schema import Plan, ResolvedRequest, ShardingDegrees

_ESTIMATE_ERROR = 0.02
"""Largest relative difference between the batched estimate and the simulator."""

_CANDIDATE_GAP = (1 + _ESTIMATE_ERROR) / (1 - _ESTIMATE_ERROR) - 1
"""Largest relative gap to the best estimate at which the simulator may still rank a plan first."""

_MAX_SIMULATED = 48
"""Most plans that are simulated."""
_MAX_INFEASIBLE = 4
_FAMILIES = 24
"""Number of plan families from which runners-up are chosen."""


def choose_multi_device(space: PlanSpace) -> PlanningResult:
    """Chooses the plan that ends the run first on a machine of several devices.

    Args:
        space: the plans that the request leaves open; `request.memory` replaces the capacity of the
            machine's device memory.

    Raises:
        InputErrors: the request asks for something impossible.
        PlanError: there is no plan at all.
    """
    request = space.request
    budget_bytes = request.memory or space.machine.device.memory.capacity_bytes
    if request.phases is not None and request.phases > 1:
        return _best_in_phases(space, budget_bytes, ())
    search = BranchAndBound(space, budget_bytes)
    result = search.fastest(_MAX_SIMULATED, within=_CANDIDATE_GAP, families=_FAMILIES)
    if not result.evaluated and not result.pruned:
        raise _no_legal_plan(space)
    fastest = _fastest_simulated(space, result.best, budget_bytes)
    if fastest is None:
        return _best_in_phases(space, budget_bytes, search.smallest().infeasible)
    best, chosen = fastest
    runners_up = _runners_up(space, best[0], result.by_family, budget_bytes)
    infeasible = tuple(
        replace(
            _infeasible(space, candidate, budget_bytes),
            minimal_fix=minimal_fix(space, search.chain, candidate, budget_bytes),
        )
        for candidate in result.infeasible[:_MAX_INFEASIBLE]
    )
    planning_result = _result(
        space, best, runners_up, infeasible, evaluated=result.evaluated + result.pruned
    )
    return replace(
        planning_result,
        pinned_rank=rank_of_pinned_plan(space, best, budget_bytes),
        sensitivity=sensitivities(space, chosen, best[1].by_term),
    )


def _best_in_phases(
    space: PlanSpace, budget_bytes: int, smallest: Sequence[Candidate]
) -> PlanningResult:
    """The result for the fastest plan in phases, where they are needed or asked for."""
    result = (
        PhaseSearchResult((), 0)
        if excludes_phases(space.request)
        else search_phases(space, budget_bytes)
    )
    infeasible = tuple(
        _infeasible(space, candidate, budget_bytes) for candidate in smallest[:_MAX_INFEASIBLE]
    )
    if not result.best:
        return _nothing_fits(space, infeasible, budget_bytes)
    best, predictions = result.best[0], dict(result.best)
    rivals = best_of_families(best[0], predictions)
    others = [(plan, predictions[plan]) for plan in rivals]
    planning_result = _result(
        space, best, others, infeasible, evaluated=result.evaluated + len(smallest)
    )
    return replace(planning_result, pinned_rank=_rank_in_phases(space, best))


def _rank_in_phases(space: PlanSpace, chosen: EvaluatedPlan) -> PinnedRank | None:
    """Rank of the chosen plan in phases without the request's pins; None if nothing is pinned."""
    request = without_pins(space.request)
    if request == space.request:
        return None
    unpinned = choose_multi_device(replace(space, request=request))
    return rank_in_phases(chosen, unpinned, request.train.steps)


def _result(
    space: PlanSpace,
    best: EvaluatedPlan,
    others: Sequence[EvaluatedPlan],
    infeasible: tuple[InfeasiblePlan, ...],
    *,
    evaluated: int,
) -> PlanningResult:
    plan, prediction = best
    steps = space.request.train.steps
    return PlanningResult(
        plan=plan,
        prediction=prediction,
        run_seconds=_run_seconds(best, steps),
        runners_up=tuple(runner_up(best, other, steps) for other in others),
        infeasible=infeasible,
        evaluated=evaluated,
    )


def _fastest_simulated(
    space: PlanSpace, candidates: Sequence[Candidate], budget_bytes: int
) -> tuple[EvaluatedPlan, Candidate] | None:
    """The candidate that the simulator finds fastest and whose full program fits; None if none is.

    A plan whose estimate exceeds the best known time by more than its error cannot be the fastest,
    so it is not simulated.
    """
    simulated: list[tuple[EvaluatedPlan, Candidate]] = []
    steps = space.request.train.steps
    fastest = float("inf")
    for candidate in candidates:
        if candidate.step_seconds * (1 - _ESTIMATE_ERROR) > fastest:
            continue
        item = _simulate(space, candidate, budget_bytes)
        if item[1].fits:
            simulated.append((item, candidate))
            fastest = min(fastest, _run_seconds(item, steps) / steps)
    simulated.sort(key=lambda pair: _rank(pair[0], steps))
    exact = ((_with_full_peak(item, space, budget_bytes), each) for item, each in simulated)
    return next((pair for pair in exact if pair[0][1].fits), None)


def _simulate(space: PlanSpace, candidate: Candidate, budget_bytes: int) -> EvaluatedPlan:
    return _simulated(space.plan(candidate.batch, candidate.row), space, budget_bytes)


def _simulated(plan: Plan, space: PlanSpace, budget_bytes: int) -> EvaluatedPlan:
    return plan, with_budget(extrapolate(plan, space.graph, space.machine), budget_bytes)


def _runners_up(
    space: PlanSpace, best: Plan, families: Iterable[Candidate], budget_bytes: int
) -> list[EvaluatedPlan]:
    """The fastest plan of each family that lost, and the chosen one in other numbers and modes."""
    plans = (space.plan(candidate.batch, candidate.row) for candidate in families)
    rivals = best_of_families(best, plans)
    simulated = (
        _with_full_peak(_simulated(plan, space, budget_bytes), space, budget_bytes)
        for plan in dict.fromkeys((*_twins(space, best), *rivals))
    )
    fitting = (item for item in simulated if item[1].fits)
    steps = space.request.train.steps
    return sorted(fitting, key=lambda item: _run_seconds(item, steps))


def _twins(space: PlanSpace, best: Plan) -> Iterator[Plan]:
    """The plan in each other precision that is open, and compiled or not."""
    others = [vary(best, precision=each) for each in space.precisions if each != best.precision]
    if space.request.compile is None:
        others.append(vary(best, compiled=not best.compile))
    for plan in others:
        captured = is_captured(space.graph, plan.precision, compiled=plan.compile)
        if captured and not plan_errors(plan, space.graph, space.machine):
            yield plan


def _with_full_peak(item: EvaluatedPlan, space: PlanSpace, budget_bytes: int) -> EvaluatedPlan:
    """The plan with the peaks of its full program, by which a run is admitted before it starts."""
    plan, extrapolated = item
    full = tier_peaks(plan, space.graph, space.machine, lower(plan, space.graph))
    return plan, with_budget(extrapolated.model_copy(update={"peaks": full}), budget_bytes)


def _infeasible(space: PlanSpace, candidate: Candidate, budget_bytes: int) -> InfeasiblePlan:
    """The smallest plan of a family in which none fits, by its program."""
    plan = space.plan(candidate.batch, candidate.row)
    return infeasible_plan(
        plan, fullest_stage_memory(plan, space.graph, space.machine), budget_bytes
    )


def _nothing_fits(
    space: PlanSpace, infeasible: Sequence[InfeasiblePlan], budget_bytes: int
) -> PlanningResult:
    """The result without a plan: what comes nearest, in phases or not, and what it would take.

    Raises:
        PlanError: no plan is legal at all.
    """
    lack = None if excludes_phases(space.request) else shortfall(space, budget_bytes)
    in_phases = [] if lack is None else [_infeasible_in_phases(lack.plan, space, budget_bytes)]
    nearest = sorted((*infeasible, *in_phases), key=lambda plan: plan.peak_bytes)
    if not nearest:
        raise _no_legal_plan(space)
    first = nearest[0]
    process_bytes = space.machine.device.process_bytes(compiled=first.plan.compile)
    unsharded = first.plan.model_copy(update={"sharding": ShardingDegrees()})
    state_bytes = training_state_bytes(unsharded, space.graph) * first.plan.parallel.tensor
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
            state_bytes=state_bytes,
            tier_shortages=(),
            devices=ceil(state_bytes / free_bytes) if free_bytes > 0 else None,
            in_phases=() if lack is None else lack.sentences,
        ),
        evaluated=len(nearest),
    )


def _no_legal_plan(space: PlanSpace) -> WindlassError:
    """The error of a request whose pins no plan keeps all at once."""
    pins, machine = dict(_pins(space.request)), space.machine
    if not offload_tiers(machine) and (space.request.phases or 1) > 1:
        fault = f"`phases` = {space.request.phases}, but `{machine.name}` has no offload tier"
        return InputErrors([f"{fault} to hold the other phases; leave it out"])
    try:
        pinned_plans(space.request, space.graph, machine)
    except InputErrors as error:
        # They complete the request by plain values, whose faults are none of the user's.
        own = [each for each in error.messages if set(_KEY_AND_VALUE.findall(each)) <= pins.keys()]
        if own:
            return InputErrors(own)
    asked = ", ".join(f"`{key}` = {value}" for key, value in pins.items())
    return PlanError(
        f"no plan of `{space.graph.name}` for {machine.devices} devices of `{machine.name}` keeps "
        f"all of {asked} at once; leave one of them out"
    )


_KEY_AND_VALUE = re.compile(r"(?<! x )`([a-z_.]+)` = ")
"""What a sentence says that a request asks for."""


def _pins(request: ResolvedRequest) -> Iterator[tuple[str, object]]:
    """The keys of a plan that a request names, with their values."""
    yield "train.batch", request.train.batch
    for name in ("parallel", "sharding", "offload", "batch"):
        for key, value in getattr(request, name):
            if value is not None:
                yield f"{name}.{key}", value
    for name in ("precision", "compile", "recompute"):
        if (value := getattr(request, name)) is not None:
            yield name, value
    if request.recompute_layers is not None:
        yield "recompute_layers", show_recompute_layers(request.recompute_layers)
    if (request.phases or 1) > 1:  # other pins imply a single one
        yield "phases", request.phases


def _infeasible_in_phases(plan: Plan, space: PlanSpace, budget_bytes: int) -> InfeasiblePlan:
    memory = fullest_stage_memory(plan, space.graph, space.machine)
    return infeasible_plan(plan, memory, budget_bytes)


def _run_seconds(item: EvaluatedPlan, steps: int) -> float:
    return item[1].step_seconds * steps + item[1].compile_seconds


def _rank(item: EvaluatedPlan, steps: int) -> tuple[float, bool, int, int]:
    """Sort key: faster first; then no offload, less device memory, the larger micro-batch."""
    plan, prediction = item
    peak_bytes = prediction.peaks[0].peak_bytes
    return _run_seconds(item, steps), plan.offloads, peak_bytes, -plan.batch.micro
