"""Alone: the plans of one device that fit, those first whose runs are predicted to end first.

Its layers are all near, with optimizer state beside them or in a tier beyond; or they take turns.
The more lives beyond, the longer the list of plans and the dearer it is to clock one. So those that
keep all near are weighed first, and of the others only what may yet be faster:

- with its state away a step still has all that its twin with state near has, but for the updates;
- in phases it has the passes of all layers, those of all phases but the last run again
  (`podphases`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from windlass.planner.result import run_seconds
from windlass.planner.search.extrapolate import EvaluatedPlan, PeakMemory, evaluate
from windlass.planner.search.memory_filter import (
    FilteredPlans,
    filter_by_memory,
    without_needless_recompute,
)
from windlass.planner.search.min_recompute import min_recompute_plans
from windlass.planner.search.phase_search import search_phases
from windlass.planner.space.options import excludes_phases, open_single_stage_plans, vary
from windlass.planner.space.phase_space import offload_tiers, offloaded_bytes
from windlass.planner.space.plan_space import PlanSpace
from windlass.schema.graph import Graph
from windlass.schema.machine import Machine
from windlass.schema.plan import DEVICE_TIER, Offload, Plan
from windlass.schema.prediction import Prediction
from windlass.schema.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleDeviceResult:
    """What one device can do for a request."""

    fitting: tuple[EvaluatedPlan, ...]
    """Plans that fit, the fastest run first; not those that a bound told to be slower."""
    whole: tuple[Plan, ...]
    """Plans that fit with all layers near, also those that compute twice what they could keep."""
    refused: tuple[tuple[Plan, PeakMemory], ...]
    """Of each family with all layers near that does not fit the plan that comes nearest."""
    weighed: int
    """Plans that were compared."""


def search_single_device(
    request: Request, graph: Graph, machine: Machine, near_bytes: int
) -> SingleDeviceResult:
    """Every plan for one device that a request leaves open and that fits, as far as it may win.

    Args:
        request: pins whatever it names.
        graph: captured from the request's model.
        machine: of one device.
        near_bytes: of its near tier.

    Raises:
        Faults: the request asks for what cannot be.
    """
    return _Alone(request, graph, machine, near_bytes).found()


class _Alone:
    def __init__(self, request: Request, graph: Graph, machine: Machine, near_bytes: int) -> None:
        self._request, self._graph, self._machine = request, graph, machine
        self._near = near_bytes
        self._best = inf
        """Seconds of the fastest run that was found."""
        self._weighed: list[EvaluatedPlan] = []

    def found(self) -> SingleDeviceResult:
        """All three kinds, each with what the ones before it have found as its bound."""
        request = self._request
        near, away, turned = (
            FilteredPlans(fitting=(), refused=()),
            FilteredPlans(fitting=(), refused=()),
            0,
        )
        count = 0
        if request.phases is None or request.phases == 1:
            every = open_single_stage_plans(request, self._graph, self._machine)
            kept = () if request.offload.optimizer not in (None, DEVICE_TIER) else every
            beyond = self._beyond(every)
            near, away = (
                filter_by_memory(each, self._graph, self._machine, self._near)
                for each in (kept, beyond)
            )
            count = len(kept) + len(beyond)
            for plan in self._spared(near):
                self._weigh(plan)
            self._weigh_away(away)
        if self._turns():
            turned = self._weigh_phases()
        self._weighed.sort(key=self._rank)
        return SingleDeviceResult(
            fitting=tuple(self._weighed),
            whole=(*near.fitting, *away.fitting),
            refused=tuple(
                sorted((*near.refused, *away.refused), key=lambda item: item[1].peak_bytes)
            ),
            weighed=count + turned,
        )

    def _beyond(self, every: tuple[Plan, ...]) -> tuple[Plan, ...]:
        """The plans with their state in each tier beyond that has room for it."""
        pin = self._request.offload.optimizer
        tiers = [tier for tier in offload_tiers(self._machine) if pin in (None, tier.name)]
        away = (
            (plan.model_copy(update={"offload": Offload(optimizer=tier.name)}), tier.capacity_bytes)
            for tier in tiers
            for plan in every
            if plan.precision != "float64"
        )
        return tuple(plan for plan, room in away if offloaded_bytes(plan, self._graph) <= room)

    def _turns(self) -> bool:
        """Whether layers may take turns.

        Then all of them but those of the last phase run again. So where the request says how much
        is to run again, they do only if nothing fits without.
        """
        request = self._request
        if excludes_phases(request):
            return False
        pinned = request.recompute is not None or request.recompute_layers is not None
        return request.phases is not None or not (pinned and self._weighed)

    def _spared(self, sieved: FilteredPlans) -> Iterator[Plan]:
        """What fits, with only as much run again as it takes, in each way that there is."""
        open_ = self._request.recompute is None and self._request.recompute_layers is None
        for plan in without_needless_recompute(sieved.fitting):
            if open_ and plan.recompute != "none":
                yield from min_recompute_plans(plan, self._graph, self._machine, self._near)
            else:
                yield plan

    def _weigh(self, plan: Plan) -> None:
        prediction = evaluate(plan, self._graph, self._machine, near_bytes=self._near)
        self._weighed.append((plan, prediction))
        self._best = min(self._best, self._run_seconds(prediction))

    def _weigh_away(self, sieved: FilteredPlans) -> None:
        """Weighs plans whose state is away, until what is left cannot be the fastest."""
        least: dict[Plan, float] = {}
        bounded: list[tuple[float, int, Plan]] = []
        for plan in without_needless_recompute(sieved.fitting):
            twin = vary(plan, recompute="none").model_copy(update={"offload": Offload()})
            if twin not in least:
                least[twin] = self._run_seconds(self._without_updates(twin))
            bounded.append((least[twin], len(bounded), plan))
        for seconds, _, plan in sorted(bounded):
            if seconds >= self._best:
                break
            for each in self._spared(FilteredPlans(fitting=(plan,), refused=())):
                self._weigh(each)

    def _without_updates(self, plan: Plan) -> Prediction:
        prediction = evaluate(plan, self._graph, self._machine, near_bytes=self._near)
        seconds = prediction.step_seconds - prediction.by_kind.get("update", 0.0)
        return prediction.model_copy(update={"step_seconds": seconds})

    def _weigh_phases(self) -> int:
        """Weighs plans whose layers take turns, until what is left cannot be the fastest."""
        field = PlanSpace(self._request, self._graph, self._machine)
        turned = search_phases(field, self._near, below=self._best / self._request.train.steps)
        self._weighed += turned.best
        return turned.weighed

    def _run_seconds(self, prediction: Prediction) -> float:
        return run_seconds(prediction, self._request.train.steps)

    def _rank(self, item: EvaluatedPlan) -> tuple[float, bool, int, int]:
        """Faster first; then what moves nothing, the emptier near tier, the larger micro-batch."""
        plan, prediction = item
        peak = prediction.peaks[0].peak_bytes
        return self._run_seconds(prediction), plan.offloads, peak, -plan.batch.micro
