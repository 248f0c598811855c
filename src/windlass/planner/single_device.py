"""Searches the plans of one device that fit, and ranks them by predicted run time.

Layers are all in device memory, with optimizer state beside them or offloaded; or they run in
    phases.
The more is offloaded, the more plans there are and the longer each takes to simulate. So plans that
    keep
everything on the device are evaluated first, and of the others only those that may still be faster:

- a plan with offloaded optimizer state takes no less than its twin without offloading, updates
  excluded;
- a plan in phases runs the passes of all layers, and recomputes all phases but the last
  (`phase_bounds`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from windlass.planner.result import run_seconds
from windlass.planner.search.extrapolate import DevicePeak, EvaluatedPlan, evaluate
from windlass.planner.search.memory_filter import (
    FilteredPlans,
    filter_by_memory,
    without_needless_recompute,
)
from windlass.planner.search.min_recompute import min_recompute_plans
from windlass.planner.search.phase_search import search_phases
from windlass.planner.space.options import open_single_stage_plans, vary
from windlass.planner.space.phase_space import offload_tiers, offloaded_bytes
from windlass.planner.space.pins import excludes_phases
from windlass.planner.space.plan_space import PlanSpace
from windlass.schema import DEVICE_TIER, Graph, Machine, Offload, Plan, Prediction, ResolvedRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleDeviceResult:
    """Plans for a request on one device."""

    fitting: tuple[EvaluatedPlan, ...]
    """Plans that fit, the fastest run first; without those that a bound proved slower."""
    in_memory: tuple[Plan, ...]
    """Plans that fit with all layers on the device, including those with needless recompute."""
    infeasible: tuple[tuple[Plan, DevicePeak], ...]
    """The nearest plan of each family in which some plan with all layers on the device does not
    fit."""
    evaluated: int
    """Number of plans that were compared."""


def search_single_device(
    request: ResolvedRequest, graph: Graph, machine: Machine, budget_bytes: int
) -> SingleDeviceResult:
    """Evaluates the plans for one device that a request leaves open, as far as they may win.

    Args:
        request: pins whatever it names.
        graph: captured from the request's model.
        machine: a machine of one device.
        budget_bytes: device memory budget.

    Raises:
        InputErrors: the request asks for something impossible.
    """
    return _SingleDeviceSearch(request, graph, machine, budget_bytes).result()


class _SingleDeviceSearch:
    def __init__(
        self, request: ResolvedRequest, graph: Graph, machine: Machine, budget_bytes: int
    ) -> None:
        self._request, self._graph, self._machine = request, graph, machine
        self._budget_bytes = budget_bytes
        self._best = inf
        """Seconds of the fastest run found so far."""
        self._evaluated: list[EvaluatedPlan] = []

    def result(self) -> SingleDeviceResult:
        """Evaluates all three kinds of plans, each bounded by the fastest plan so far."""
        request = self._request
        on_device, offloaded, in_phases = (
            FilteredPlans(fitting=(), infeasible=()),
            FilteredPlans(fitting=(), infeasible=()),
            0,
        )
        count = 0
        if request.phases is None or request.phases == 1:
            plans = open_single_stage_plans(request, self._graph, self._machine)
            unoffloaded = () if request.offload.optimizer not in (None, DEVICE_TIER) else plans
            with_offload = self._with_offloaded_optimizer(plans)
            on_device, offloaded = (
                filter_by_memory(each, self._graph, self._machine, self._budget_bytes)
                for each in (unoffloaded, with_offload)
            )
            count = len(unoffloaded) + len(with_offload)
            for plan in self._with_min_recompute(on_device):
                self._evaluate(plan)
            self._evaluate_offloaded(offloaded)
        if self._tries_phases():
            in_phases = self._evaluate_phases()
        self._evaluated.sort(key=self._rank)
        return SingleDeviceResult(
            fitting=tuple(self._evaluated),
            in_memory=(*on_device.fitting, *offloaded.fitting),
            infeasible=tuple(
                sorted(
                    (*on_device.infeasible, *offloaded.infeasible),
                    key=lambda item: item[1].peak_bytes,
                )
            ),
            evaluated=count + in_phases,
        )

    def _with_offloaded_optimizer(self, plans: tuple[Plan, ...]) -> tuple[Plan, ...]:
        """The plans with optimizer state in each offload tier that has room for it."""
        pin = self._request.offload.optimizer
        tiers = [tier for tier in offload_tiers(self._machine) if pin in (None, tier.name)]
        offloaded = (
            (plan.model_copy(update={"offload": Offload(optimizer=tier.name)}), tier.capacity_bytes)
            for tier in tiers
            for plan in plans
            if plan.precision != "float64"
        )
        return tuple(
            plan for plan, capacity in offloaded if offloaded_bytes(plan, self._graph) <= capacity
        )

    def _tries_phases(self) -> bool:
        """Whether plans in phases are to be tried.

        In phases all layers but those of the last phase are recomputed. So if the request pins
        recompute, phases are tried only when nothing fits without them.
        """
        request = self._request
        if excludes_phases(request):
            return False
        pinned = request.recompute is not None or request.recompute_layers is not None
        return request.phases is not None or not (pinned and self._evaluated)

    def _with_min_recompute(self, filtered: FilteredPlans) -> Iterator[Plan]:
        """Plans that fit, each with the least recompute with which it still fits, in each mode."""
        is_open = self._request.recompute is None and self._request.recompute_layers is None
        for plan in without_needless_recompute(filtered.fitting):
            if is_open and plan.recompute != "none":
                yield from min_recompute_plans(plan, self._graph, self._machine, self._budget_bytes)
            else:
                yield plan

    def _evaluate(self, plan: Plan) -> None:
        prediction = evaluate(plan, self._graph, self._machine, budget_bytes=self._budget_bytes)
        if prediction.fits:
            self._evaluated.append((plan, prediction))
            self._best = min(self._best, self._run_seconds(prediction))

    def _evaluate_offloaded(self, filtered: FilteredPlans) -> None:
        """Evaluates plans with offloaded optimizer state until no other can be the fastest."""
        bounds: dict[Plan, float] = {}
        ordered: list[tuple[float, int, Plan]] = []
        for plan in without_needless_recompute(filtered.fitting):
            twin = vary(plan, recompute="none").model_copy(update={"offload": Offload()})
            if twin not in bounds:
                bounds[twin] = self._run_seconds(self._without_updates(twin))
            ordered.append((bounds[twin], len(ordered), plan))
        for seconds, _, plan in sorted(ordered):
            if seconds >= self._best:
                break
            for each in self._with_min_recompute(FilteredPlans(fitting=(plan,), infeasible=())):
                self._evaluate(each)

    def _without_updates(self, plan: Plan) -> Prediction:
        prediction = evaluate(plan, self._graph, self._machine, budget_bytes=self._budget_bytes)
        seconds = prediction.step_seconds - prediction.by_kind.get("update", 0.0)
        return prediction.model_copy(update={"step_seconds": seconds})

    def _evaluate_phases(self) -> int:
        """Evaluates plans in phases until no other can be the fastest."""
        space = PlanSpace(self._request, self._graph, self._machine)
        result = search_phases(
            space, self._budget_bytes, below_seconds=self._best / self._request.train.steps
        )
        self._evaluated += result.best
        return result.evaluated

    def _run_seconds(self, prediction: Prediction) -> float:
        return run_seconds(prediction, self._request.train.steps)

    def _rank(self, item: EvaluatedPlan) -> tuple[float, bool, int, int]:
        """Sort key: faster first; then no offload, less device memory, the larger micro-batch."""
        plan, prediction = item
        peak = prediction.peaks[0].peak_bytes
        return self._run_seconds(prediction), plan.offloads, peak, -plan.batch.micro
