"""The result for a plan that is given: it is checked and predicted, and nothing is searched."""

from math import ceil

from windlass.cost import ArrayClock, KeptCode
from windlass.errors import InputErrors, PlanError
from windlass.planner.advice.nearest_sayable import pinned_by, with_nearest
from windlass.planner.result import Advice, Change, PlanningResult, run_seconds
from windlass.planner.search.evaluate import evaluate, infeasible_plan, training_state_bytes
from windlass.planner.space.pins import broken_pins
from windlass.program import plan_errors
from windlass.schema import Graph, Machine, Plan, Prediction, Request, ResolvedRequest
from windlass.units import format_bytes

_MIB = 2**20


def request_of_plan(plan: Plan, request: Request) -> Request:
    """The request with what its plan decides about results: batch, optimizer, moments, clipping.

    Raises:
        InputErrors: every value that the request names and of which the plan has another.
    """
    conflicts = [
        f"`{key}` = {asked}, but the plan has {planned}"
        for key, asked, planned in broken_pins(request, plan)
    ]
    if conflicts:
        conflicts[-1] += "; leave out what the plan decides, or change the plan"
        raise InputErrors(conflicts)
    train: dict[str, object] = {"batch": plan.global_batch, "sequence": plan.batch.sequence}
    if plan.optimizer is not None:
        train["optimizer"] = plan.optimizer
    if plan.ema is not None:
        train["ema"] = plan.ema
    if not plan.clip:
        train["clip"] = None
    return request.model_copy(
        update={
            "train": request.train.model_copy(update=train),
            "moments": plan.moments,
            "master_weights": plan.master_weights is None,
        }
    )


def result_of_given_plan(
    plan: Plan,
    request: ResolvedRequest,
    graph: Graph,
    machine: Machine,
    *,
    kept_code: KeptCode = frozenset(),
) -> PlanningResult:
    """A given plan with its prediction; without a plan but with advice if memory is too small.

    Args:
        plan: labelled with `graph` and `machine`.
        request: `memory` replaces the capacity of the machine's device memory.
        graph: the model, with shards for the plan's tensor-parallel degree.
        kept_code: compiled code of the model that earlier runs have left there.

    Raises:
        InputErrors: every rule that the plan breaks.
        PlanError: every offload tier that is too small for it.
    """
    if errors := plan_errors(plan, graph, machine):
        raise InputErrors(with_nearest(errors, pinned_by(plan, request), graph, machine))
    budget_bytes = request.memory or machine.device.memory.capacity_bytes
    clock = ArrayClock(plan, graph, machine)
    prediction = evaluate(plan, clock, budget_bytes=budget_bytes, kept_code=kept_code)
    if prediction.peaks[0].over_bytes:
        return _too_large(plan, prediction, graph, machine)
    if small := [peak for peak in prediction.peaks[1:] if peak.over_bytes]:
        needed = " and ".join(
            f"{format_bytes(peak.peak_bytes)} of `{peak.tier}`, which has "
            f"{format_bytes(peak.capacity_bytes)}"
            for peak in small
        )
        raise PlanError(f"the plan takes {needed}; change its `offload`, or plan without the file")
    seconds = run_seconds(prediction, request.train.steps)
    return PlanningResult(plan=plan, prediction=prediction, run_seconds=seconds)


def _too_large(
    plan: Plan, prediction: Prediction, graph: Graph, machine: Machine
) -> PlanningResult:
    """The result of a plan that takes more device memory than there is."""
    peak = prediction.peaks[0]
    budget_bytes, capacity_bytes = peak.capacity_bytes, machine.device.memory.capacity_bytes
    changes: tuple[Change, ...] = ()
    if peak.peak_bytes <= capacity_bytes:
        overrides = (f"memory={ceil(peak.peak_bytes / _MIB)}MiB",)
        changes = (Change(overrides=overrides, plan=plan, peak_bytes=peak.peak_bytes, cost=0.0),)
    state_bytes = training_state_bytes(plan, graph)
    free_bytes = budget_bytes - machine.device.process_bytes(compiled=plan.compile)
    return PlanningResult(
        plan=None,
        prediction=None,
        infeasible=(infeasible_plan(plan, graph, machine, budget_bytes),),
        advice=Advice(
            budget_bytes=budget_bytes,
            needed_bytes=peak.peak_bytes,
            nearest=plan,
            over_bytes=peak.over_bytes,
            by_class=peak.by_class,
            changes=changes,
            state_bytes=state_bytes,
            tier_shortages=(),
            devices=ceil(state_bytes / free_bytes) if free_bytes > 0 else None,
            in_phases=("planning without the file looks for a plan that fits",),
        ),
    )
