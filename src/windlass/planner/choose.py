"""Choose: the plan whose whole run is predicted to end first, of those that fit."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from windlass.cost.predict import predict
from windlass.errors import InputErrors
from windlass.planner.advice.advise import advise
from windlass.planner.advice.minimal_change import minimal_fix_single_device
from windlass.planner.advice.offload_feasibility import require_optimizer_tier, require_phases
from windlass.planner.advice.shortfall import closest_single_device_in_phases
from windlass.planner.gc_paused import gc_paused
from windlass.planner.multi_device import choose_multi_device
from windlass.planner.result import (
    InfeasiblePlan,
    PlanningResult,
    infeasible_plan,
    run_seconds,
    runner_up,
)
from windlass.planner.search.extrapolate import EvaluatedPlan, evaluate, with_budget
from windlass.planner.single_device import SingleDeviceResult, search_single_device
from windlass.planner.space.options import request_faults, vary
from windlass.planner.space.plan_space import PlanSpace
from windlass.schema.graph import Graph
from windlass.schema.machine import Machine
from windlass.schema.plan import Plan
from windlass.schema.request import Request

_RUNNERS_UP = 5
_LIFTED = 4
"""Plans that do not fit of which is looked for what would help, where another fits."""


@gc_paused
def choose(request: Request, graph: Graph, machine: Machine) -> PlanningResult:
    """The plan that ends the run first, and why not another.

    The run is `train.steps` steps and, where the plan compiles, the compilation before them.

    Args:
        request: what is wanted; whatever it pins is held.
        graph: captured from the request's model.
        machine: to run on; `request.near` takes the place of its near tier's capacity.

    Returns:
        A choice with a plan, or with advice if nothing fits.

    Raises:
        Faults: the request asks for what cannot be.
    """
    if machine.devices > 1:
        if wrong := tuple(request_faults(request, graph, machine)):
            raise InputErrors(wrong)
        return choose_multi_device(request, graph, machine)
    near_bytes = request.memory or machine.device.memory.capacity_bytes
    if request.phases is not None and request.phases > 1:
        require_phases(request, graph, machine)
    require_optimizer_tier(request, graph, machine)
    found = search_single_device(request, graph, machine, near_bytes)
    if not found.fitting:
        return _nothing_fits(found, request, graph, machine, near_bytes)
    return _fastest(found, request, graph, machine, near_bytes)


def _fastest(
    found: SingleDeviceResult, request: Request, graph: Graph, machine: Machine, near_bytes: int
) -> PlanningResult:
    """The first of those that fit, what it won against, and what lifts those that do not fit."""
    steps = request.train.steps
    (plan, short), *_ = found.fitting
    again = _recomputing(plan, found.whole, graph, machine, near_bytes)
    weighed = sorted((*found.fitting, *again), key=lambda item: run_seconds(item[1], steps))
    # The winner's own program, whole: the same numbers, told of the program that will run.
    prediction = with_budget(predict(plan, graph, machine), near_bytes)
    return PlanningResult(
        plan=plan,
        prediction=prediction,
        run_seconds=run_seconds(prediction, steps),
        runners_up=tuple(runner_up((plan, short), item, steps) for item in _runners_up(weighed)),
        refused=tuple(_lifted(found, request, graph, machine, near_bytes)),
        weighed=found.weighed,
    )


def _lifted(
    found: SingleDeviceResult, request: Request, graph: Graph, machine: Machine, near_bytes: int
) -> Iterator[InfeasiblePlan]:
    """The plans that do not fit, the nearest of them with what lifts that."""
    for at, (plan, memory) in enumerate(found.refused):
        told = infeasible_plan(plan, memory, near_bytes)
        if at < _LIFTED:
            told = replace(
                told, lift=minimal_fix_single_device(plan, request, graph, machine, near_bytes)
            )
        yield told


def _nothing_fits(
    found: SingleDeviceResult, request: Request, graph: Graph, machine: Machine, near_bytes: int
) -> PlanningResult:
    """What comes nearest, and what would help."""
    turned = closest_single_device_in_phases(PlanSpace(request, graph, machine), near_bytes)
    refused = (*found.refused, *((turned,) if turned else ()))
    nearest = sorted(refused, key=lambda item: item[1].peak_bytes)
    return PlanningResult(
        plan=None,
        prediction=None,
        refused=tuple(infeasible_plan(plan, memory, near_bytes) for plan, memory in nearest),
        advice=advise(request, graph, machine, nearest),
        weighed=found.weighed,
    )


def _runners_up(weighed: Sequence[EvaluatedPlan]) -> list[EvaluatedPlan]:
    """The next best, and the best with another precision, mode or recompute if not among them."""
    shown = list(weighed[1 : _RUNNERS_UP + 1])
    best = weighed[0][0]
    for trait in (_precision, _compile, _recompute, _phases):
        other = next((item for item in weighed if trait(item[0]) != trait(best)), None)
        if other is not None and other not in shown:
            shown.append(other)
    return shown


def _precision(plan: Plan) -> str:
    return plan.precision


def _compile(plan: Plan) -> bool:
    return plan.compile


def _recompute(plan: Plan) -> str:
    return plan.recompute


def _phases(plan: Plan) -> str:
    return str(len(plan.stages[0].phases))


def _recomputing(
    best: Plan, fitting: Sequence[Plan], graph: Graph, machine: Machine, near_bytes: int
) -> list[EvaluatedPlan]:
    """The best plan with recompute, if it was open: users ask what recompute would cost."""
    twin = vary(best, recompute="full")
    if twin == best or twin not in fitting:
        return []
    return [(twin, evaluate(twin, graph, machine, near_bytes=near_bytes))]
