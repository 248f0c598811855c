"""Chooses the plan that fits and whose whole run is predicted to end first."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from windlass.cost import predict_plan
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
    best_of_families,
    infeasible_plan,
    run_seconds,
    runner_up,
)
from windlass.planner.search.extrapolate import EvaluatedPlan, evaluate, with_budget
from windlass.planner.single_device import SingleDeviceResult, search_single_device
from windlass.planner.space.options import request_faults, vary
from windlass.planner.space.pins import broken_pins, without_excluded_phases
from windlass.planner.space.plan_space import PlanSpace
from windlass.schema import Graph, Machine, Plan, Prediction, ResolvedRequest

_MAX_FIXES = 4
"""Infeasible plans for which a minimal fix is searched, where another plan fits."""


@gc_paused
def choose_plan(
    request: ResolvedRequest, graph: Graph, machine: Machine, *, every_grid: bool = False
) -> PlanningResult:
    """Chooses the plan that ends the run first, and says why not another.

    The run is `train.steps` steps and, if the plan compiles, the compilation before them.

    Args:
        request: what the user asks for; whatever it pins is kept.
        graph: captured from the request's model.
        machine: to run on; `request.memory` replaces the capacity of its device memory.
        every_grid: whether the tensor-parallel grids that need least memory are open too, on
            several devices.

    Returns:
        A result with a plan, or with advice if nothing fits.

    Raises:
        InputErrors: the request asks for something impossible.
    """
    request = without_excluded_phases(request, machine)
    result = _choose(request, graph, machine, every_grid=every_grid)
    broken = () if result.plan is None else tuple(broken_pins(request, result.plan))
    if broken:  # Every pin is kept, or refused before the search: this is a bug of ours.
        words = ", ".join(f"`{key}` = {planned}, not {asked}" for key, asked, planned in broken)
        raise RuntimeError(f"the chosen plan breaks its request: {words}")
    return result


def _choose(
    request: ResolvedRequest, graph: Graph, machine: Machine, *, every_grid: bool
) -> PlanningResult:
    """The fastest plan that fits, or advice."""
    if machine.devices > 1:
        if wrong := tuple(request_faults(request, graph, machine)):
            raise InputErrors(wrong)
        return choose_multi_device(PlanSpace(request, graph, machine, every_grid))
    budget_bytes = request.memory or machine.device.memory.capacity_bytes
    if request.phases is not None and request.phases > 1:
        require_phases(request, graph, machine)
    require_optimizer_tier(request, graph, machine)
    result = search_single_device(request, graph, machine, budget_bytes)
    for index, (plan, _) in enumerate(result.fitting):
        # The winner is predicted again from the full program that will run.
        prediction = with_budget(predict_plan(plan, graph, machine), budget_bytes)
        if prediction.fits:
            others = replace(result, fitting=result.fitting[index:])
            return _fastest(others, prediction, request, graph, machine)
    return _nothing_fits(result, request, graph, machine, budget_bytes)


def _fastest(
    result: SingleDeviceResult,
    prediction: Prediction,
    request: ResolvedRequest,
    graph: Graph,
    machine: Machine,
) -> PlanningResult:
    """The result for the fastest plan that fits, with runners-up and infeasible plans."""
    steps, budget_bytes = request.train.steps, prediction.peaks[0].capacity_bytes
    (plan, extrapolated), *_ = result.fitting
    twins = _recompute_twin(plan, result.in_memory, graph, machine, budget_bytes)
    ranked = sorted((*result.fitting, *twins), key=lambda item: run_seconds(item[1], steps))
    rivals = best_of_families(plan, (each for each, _ in ranked))
    return PlanningResult(
        plan=plan,
        prediction=prediction,
        run_seconds=run_seconds(prediction, steps),
        runners_up=tuple(
            runner_up((plan, extrapolated), item, steps) for item in ranked if item[0] in rivals
        ),
        infeasible=tuple(_infeasible_with_fixes(result, request, graph, machine, budget_bytes)),
        evaluated=result.evaluated,
    )


def _infeasible_with_fixes(
    result: SingleDeviceResult,
    request: ResolvedRequest,
    graph: Graph,
    machine: Machine,
    budget_bytes: int,
) -> Iterator[InfeasiblePlan]:
    """The infeasible plans, the nearest of them with the change that would make them fit."""
    for index, (plan, memory) in enumerate(result.infeasible):
        item = infeasible_plan(plan, memory, budget_bytes)
        if index < _MAX_FIXES:
            item = replace(
                item,
                minimal_fix=minimal_fix_single_device(plan, request, graph, machine, budget_bytes),
            )
        yield item


def _nothing_fits(
    result: SingleDeviceResult,
    request: ResolvedRequest,
    graph: Graph,
    machine: Machine,
    budget_bytes: int,
) -> PlanningResult:
    """The result without a plan: the nearest plans, and advice."""
    in_phases = closest_single_device_in_phases(PlanSpace(request, graph, machine), budget_bytes)
    infeasible = (*result.infeasible, *((in_phases,) if in_phases else ()))
    nearest = sorted(infeasible, key=lambda item: item[1].peak_bytes)
    return PlanningResult(
        plan=None,
        prediction=None,
        infeasible=tuple(infeasible_plan(plan, memory, budget_bytes) for plan, memory in nearest),
        advice=advise(request, graph, machine, nearest),
        evaluated=result.evaluated,
    )


def _recompute_twin(
    best: Plan, fitting: Sequence[Plan], graph: Graph, machine: Machine, budget_bytes: int
) -> list[EvaluatedPlan]:
    """The best plan with full recompute, if that was open: users ask what recompute would cost."""
    twin = vary(best, recompute="full")
    if twin == best or twin not in fitting:
        return []
    return [(twin, evaluate(twin, graph, machine, budget_bytes=budget_bytes))]
