"""Among: the plan for several devices whose run is predicted to end first, and why not another.

The closed form finds the candidates, the clock decides among those whose difference it could have
mistaken: their programs are lowered and simulated, and only what fits by its program is kept.
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

_CLOSE = 0.02
"""By how much the closed form's seconds may lie from the clock's."""

_WITHIN = (1 + _CLOSE) / (1 - _CLOSE) - 1
"""By how much more than the least a plan's closed form may say that the clock finds the fastest."""

_KEPT = 48
"""Plans that the clock weighs at most."""
_RUNNERS_UP = 6
_REFUSED = 4
_TRAITS = 24
"""Sorts of plans among which runners-up are told."""


def choose_multi_device(request: Request, graph: Graph, machine: Machine) -> PlanningResult:
    """The plan that ends the run first on a machine of several devices.

    Args:
        request: what is wanted; whatever it pins is held.
        graph: captured from the request's model, in the slices that are open.
        machine: to run on; `request.near` takes the place of its near tier's capacity.

    Raises:
        Faults: the request asks for what cannot be.
        PlanError: there is no plan at all.
    """
    near_bytes = request.memory or machine.device.memory.capacity_bytes
    field = PlanSpace(request, graph, machine)
    if request.phases is not None and request.phases > 1:
        return _in_turns(field, near_bytes, ())
    sweep = BranchAndBound(field, near_bytes)
    swept = sweep.best(_KEPT, within=_WITHIN, traits=_TRAITS)
    if not swept.weighed and not swept.skipped:
        pinned_plans(request, graph, machine)  # tells what is wrong with what is pinned
        raise InputErrors(("no plan is legal with what is pinned; leave something open",))
    places = _ranked(field, swept.best, near_bytes)
    if not places:
        return _in_turns(field, near_bytes, sweep.smallest().misses)
    ranked = [item for item, _ in places]
    plan, short = ranked[0]
    shown = _told_apart(field, ranked, swept.traits, near_bytes)
    refused = tuple(
        replace(
            _refusal(field, found, near_bytes),
            lift=minimal_fix(field, sweep.chain, found, near_bytes),
        )
        for found in swept.misses[:_REFUSED]
    )
    best = (plan, _whole(plan, short, graph, machine, near_bytes))
    choice = _choice(field, best, shown, refused, weighed=swept.weighed + swept.skipped)
    return replace(
        choice,
        standing=rank_of_pinned_plan(field, best, near_bytes),
        sensitive=sensitivities(field, places[0][1]),
    )


def _in_turns(field: PlanSpace, near_bytes: int, misses: Sequence[Candidate]) -> PlanningResult:
    """The fastest plan in phases, where layers cannot all be near, or are asked not to be."""
    turned = (
        PhaseSearchResult((), 0)
        if excludes_phases(field.request)
        else search_phases(field, near_bytes)
    )
    refused = tuple(_refusal(field, found, near_bytes) for found in misses[:_REFUSED])
    if not turned.best:
        return _nothing_fits(field, refused, near_bytes)
    best, others = turned.best[0], turned.best[1 : 1 + _RUNNERS_UP]
    told = _choice(field, best, others, refused, weighed=turned.weighed + len(misses))
    return replace(told, standing=_among_turns(field, best))


def _among_turns(field: PlanSpace, chosen: EvaluatedPlan) -> PinnedRank | None:
    """Where a plan in phases stands among those that are found with nothing of it named."""
    request = without_pins(field.request)
    if request == field.request:
        return None
    other = choose_multi_device(request, field.graph, field.machine)
    if other.plan is None or other.prediction is None or other.plan == chosen[0]:
        return PinnedRank(faster=0, plans=other.weighed, plan=None, best=None)
    steps = request.train.steps
    seconds = [other.prediction, *(runner.prediction for runner in other.runners_up)]
    faster = sum(each.step_seconds < chosen[1].step_seconds for each in seconds)
    if not faster:
        return PinnedRank(faster=0, plans=other.weighed, plan=None, best=None)
    best = runner_up((other.plan, other.prediction), chosen, steps)
    return PinnedRank(faster=faster, plans=other.weighed, plan=other.plan, best=best)


def _choice(
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
        refused=refused,
        weighed=weighed,
    )


def _ranked(
    field: PlanSpace, found: Sequence[Candidate], near_bytes: int
) -> list[tuple[EvaluatedPlan, Candidate]]:
    """Those that may be the fastest, by the clock, fastest first; only such as fit.

    A plan whose closed form is slower than the best known time by more than it may err cannot be.
    """
    weighed: list[tuple[EvaluatedPlan, Candidate]] = []
    steps = field.request.train.steps
    fastest = float("inf")
    for each in found:
        if each.step_seconds * (1 - _CLOSE) > fastest:
            continue
        item = _weighed(field, each, near_bytes)
        if item[1].fits:
            weighed.append((item, each))
            fastest = min(fastest, _run_seconds(item, steps) / steps)
    return sorted(weighed, key=lambda both: _rank(both[0], steps))


def _weighed(field: PlanSpace, found: Candidate, near_bytes: int) -> EvaluatedPlan:
    plan = field.plan(found.cell, found.place)
    return plan, with_budget(extrapolate(plan, field.graph, field.machine), near_bytes)


def _told_apart(
    field: PlanSpace, ranked: Sequence[EvaluatedPlan], traits: Iterable[Candidate], near_bytes: int
) -> list[EvaluatedPlan]:
    """Runners-up that differ in something that matters, the fastest of each sort."""
    best, shown = ranked[0], list[EvaluatedPlan]()
    told = {_sort(best[0])}
    for found in traits:
        plan = field.plan(found.cell, found.place)
        if _sort(plan) in told:
            continue
        item = _weighed(field, found, near_bytes)
        if item[1].fits:
            told.add(_sort(plan))
            shown.append(item)
        if len(shown) == _RUNNERS_UP:
            break
    return sorted(shown, key=lambda item: item[1].step_seconds)


def _sort(plan: Plan) -> tuple[object, ...]:
    """What tells plans apart in a list of runners-up."""
    shares = (plan.sharding.parameters > 1, plan.sharding.optimizer > 1)
    cut, home = plan.parallel, plan.offload.optimizer
    return cut.pipeline, cut.tensor, plan.parallel.schedule, plan.recompute, shares, home


def _whole(
    plan: Plan, short: Prediction, graph: Graph, machine: Machine, near_bytes: int
) -> Prediction:
    """The prediction with the fullest moments of the program that will run."""
    full = tier_peaks(plan, graph, machine, lower(plan, graph))
    return with_budget(short.model_copy(update={"peaks": full}), near_bytes)


def _refusal(field: PlanSpace, found: Candidate, near_bytes: int) -> InfeasiblePlan:
    """The smallest of a trait of which no plan fits, by its program."""
    plan = field.plan(found.cell, found.place)
    return infeasible_plan(plan, fullest_stage_memory(plan, field.graph, field.machine), near_bytes)


def _nothing_fits(
    field: PlanSpace, refused: Sequence[InfeasiblePlan], near_bytes: int
) -> PlanningResult:
    """What comes nearest, all layers near or in phases, and what it would take.

    Raises:
        PlanError: no plan is legal at all.
    """
    lacking = None if excludes_phases(field.request) else shortfall(field, near_bytes)
    told = [] if lacking is None else [_in_phases(lacking.plan, field, near_bytes)]
    nearest = sorted((*refused, *told), key=lambda each: each.peak_bytes)
    if not nearest:
        raise PlanError(f"no plan for {field.machine.devices} devices of `{field.machine.name}`")
    first = nearest[0]
    held = field.machine.device.process_bytes(compiled=first.plan.compile)
    whole = first.plan.model_copy(update={"sharding": ShardingDegrees()})
    state = training_state_bytes(whole, field.graph) * first.plan.parallel.tensor
    room = near_bytes - held
    return PlanningResult(
        plan=None,
        prediction=None,
        refused=tuple(nearest),
        advice=Advice(
            near_bytes=near_bytes,
            needed_bytes=first.peak_bytes,
            over_bytes=first.over_bytes,
            by_class=first.by_class,
            changes=(),
            state_bytes=state,
            far=(),
            devices=ceil(state / room) if room > 0 else None,
            in_phases=() if lacking is None else lacking.told,
        ),
        weighed=len(nearest),
    )


def _in_phases(plan: Plan, field: PlanSpace, near_bytes: int) -> InfeasiblePlan:
    memory = fullest_stage_memory(plan, field.graph, field.machine)
    return infeasible_plan(plan, memory, near_bytes)


def _run_seconds(item: EvaluatedPlan, steps: int) -> float:
    return item[1].step_seconds * steps + item[1].compile_seconds


def _rank(item: EvaluatedPlan, steps: int) -> tuple[float, bool, int, int]:
    """Faster first; then what moves nothing, the emptier near tier, the larger micro-batch."""
    plan, prediction = item
    near = prediction.peaks[0].peak_bytes
    return _run_seconds(item, steps), plan.offloads, near, -plan.batch.micro
