"""Advises when nothing fits: by how much, and the cheapest changes that would make a plan fit."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from math import ceil

from windlass.planner.advice.alternatives import alternatives, is_requestable, recompute_overrides
from windlass.planner.advice.offload_feasibility import tier_shortages
from windlass.planner.advice.shortfall import ClosestPlan, shortfall
from windlass.planner.result import Advice, Change, EvaluatedPlan, InfeasiblePlan, TierShortage
from windlass.planner.search.evaluate import evaluate, training_state_bytes
from windlass.planner.search.fastest import fastest_plans
from windlass.planner.space.options import offload_tiers, precisions, smaller_moments, vary
from windlass.planner.space.plan_space import PlanSpace
from windlass.schema import BatchRequest, Plan, ResolvedRequest, ShardingDegrees

MIN_ALTERNATIVES = 3
"""Changes that are named at least, if that many fit."""

_MIN_SEQUENCE = 64
"""Tokens below which a shorter sequence is not worth advising."""

_MIB = 2**20


def advise(
    space: PlanSpace,
    infeasible: Sequence[InfeasiblePlan],
    budget_bytes: int,
    closest: ClosestPlan | None,
) -> Advice:
    """Advises on a request that does not fit.

    Args:
        space: what is open.
        infeasible: the plans that come nearest to fitting, nearest first.
        budget_bytes: device memory budget.
        closest: the plan in phases that comes nearest to fitting; None if there is none.
    """
    return _Advisor(space, infeasible, budget_bytes).advice(closest)


class _Advisor:
    def __init__(
        self, space: PlanSpace, infeasible: Sequence[InfeasiblePlan], budget_bytes: int
    ) -> None:
        self._space, self._request = space, space.request
        self._infeasible, self._budget_bytes = infeasible, budget_bytes
        self._nearest = infeasible[0].plan
        prediction = evaluate(self._nearest, space.graph, space.machine, budget_bytes=budget_bytes)
        self._token_seconds = prediction.step_seconds / prediction.tokens_per_step
        """What the cost of a change is stated against."""

    def advice(self, closest: ClosestPlan | None) -> Advice:
        """The advice on the request."""
        space, first = self._space, self._infeasible[0]
        state_bytes = min(self._state_bytes(each.plan) for each in self._infeasible)
        device = space.machine.device
        free_bytes = self._budget_bytes - device.process_bytes(compiled=False)
        changes = list(self._larger_budget())
        is_single = space.machine.devices == 1
        if is_single and (state_bytes <= free_bytes or offload_tiers(space.machine)):
            changes += self._dropped_pins()
        if is_single:
            changes += self._alternatives(changes)
            changes += self._smaller_moments()
        lacks: tuple[str, ...] = ()
        if not is_single and closest is not None:
            lacks = shortfall(closest, space, self._budget_bytes)
        return Advice(
            budget_bytes=self._budget_bytes,
            needed_bytes=first.peak_bytes,
            over_bytes=first.over_bytes,
            by_class=first.by_class,
            changes=tuple(sorted(changes, key=lambda each: (each.cost, len(each.overrides)))),
            state_bytes=state_bytes,
            tier_shortages=self._shortages() if is_single else (),
            devices=ceil(state_bytes / free_bytes) if free_bytes > 0 else None,
            in_phases=lacks,
        )

    def _state_bytes(self, plan: Plan) -> int:
        """Bytes of weights, gradients and optimizer state of one replica."""
        unsharded = plan.model_copy(update={"sharding": ShardingDegrees()})
        return training_state_bytes(unsharded, self._space.graph) * plan.parallel.tensor

    def _shortages(self) -> tuple[TierShortage, ...]:
        """Offload tiers without room for the model in phases, in any precision."""
        graph, machine = self._space.graph, self._space.machine
        if graph.layers < 2:
            return ()
        bases = [vary(self._nearest, precision=each) for each in precisions(machine)]
        return tier_shortages(bases, graph, machine)

    def _larger_budget(self) -> Iterator[Change]:
        """A larger memory budget, if the machine has it."""
        first = self._infeasible[0]
        mebibytes = ceil(first.peak_bytes / _MIB)
        if mebibytes * _MIB <= self._space.machine.device.memory.capacity_bytes:
            yield Change(
                overrides=(f"memory={mebibytes}MiB",),
                plan=first.plan,
                peak_bytes=first.peak_bytes,
                cost=0.0,
            )

    def _dropped_pins(self) -> Iterator[Change]:
        """Pins to drop, fewest first, and a shorter sequence; none that contains a smaller one."""
        pins = tuple(self._pins())
        sufficient: list[frozenset[str]] = []
        for count in range(1, len(pins) + 1):
            for dropped in combinations(pins, count):
                if any(small <= set(dropped) for small in sufficient):
                    continue
                best = self._fastest(_without_pins(self._request, dropped))
                if best is not None and (is_requestable(best[0]) or "recompute" not in dropped):
                    sufficient.append(frozenset(dropped))
                    yield self._change(dropped, best)
        for dropped in ((), *((pins,) if pins and not sufficient else ())):
            shorter = self._shorter(_without_pins(self._request, dropped))
            if shorter:
                yield self._change(dropped, shorter, sequence=True)
                return

    def _alternatives(self, changes: Sequence[Change]) -> tuple[Change, ...]:
        """More changes, of kinds not named yet, so that `MIN_ALTERNATIVES` fit this budget."""
        return alternatives(
            self._request,
            self._space.graph,
            self._space.machine,
            self._budget_bytes,
            base=self._token_seconds,
            count=MIN_ALTERNATIVES,
            already_named=[each for each in changes if each.peak_bytes <= self._budget_bytes],
        )

    def _smaller_moments(self) -> Iterator[Change]:
        """Optimizer moments in fewer bits."""
        for moments in smaller_moments(self._request.moments):
            best = self._fastest(self._request.model_copy(update={"moments": moments}))
            if best is not None:
                yield self._as_change((f"moments={moments}",), best)

    def _pins(self) -> Iterator[str]:
        """Names of the request's pins that could be dropped to save memory."""
        request = self._request
        if request.batch.micro is not None or request.batch.accumulation is not None:
            yield "batch"
        if request.recompute is not None:
            yield "recompute"
        if request.precision is not None and len(precisions(self._space.machine)) > 1:
            yield "precision"
        if request.compile is not None:
            yield "compile"

    def _fastest(self, request: ResolvedRequest) -> EvaluatedPlan | None:
        """The fastest plan of another request that fits."""
        found = fastest_plans(replace(self._space, request=request), self._budget_bytes).best
        return found[0] if found else None

    def _shorter(self, request: ResolvedRequest) -> EvaluatedPlan | None:
        """The fastest plan of the longest sequence that fits, found by halving."""
        sequence = request.train.sequence // 2
        while sequence >= _MIN_SEQUENCE:
            train = request.train.model_copy(update={"sequence": sequence})
            fitting = self._fastest(request.model_copy(update={"train": train}))
            if fitting:
                return fitting
            sequence //= 2
        return None

    def _change(
        self, dropped: Sequence[str], fitting: EvaluatedPlan, *, sequence: bool = False
    ) -> Change:
        """The change that replaces dropped pins by a plan's values; what was open stays open."""
        request, plan = self._request, fitting[0]
        overrides: list[str] = []
        if "batch" in dropped and request.batch.micro is not None:
            overrides.append(f"batch.micro={plan.batch.micro}")
        if "batch" in dropped and request.batch.accumulation is not None:
            overrides.append(f"batch.accumulation={plan.batch.accumulation}")
        if "recompute" in dropped:
            overrides += recompute_overrides(plan, request)
        if "precision" in dropped:
            overrides.append(f"precision={plan.precision}")
        if "compile" in dropped:
            overrides.append(f"compile={str(plan.compile).lower()}")
        if sequence:
            overrides.append(f"train.sequence={plan.batch.sequence}")
        return self._as_change(tuple(overrides), fitting)

    def _as_change(self, overrides: tuple[str, ...], fitting: EvaluatedPlan) -> Change:
        plan, prediction = fitting
        token_seconds = prediction.step_seconds / prediction.tokens_per_step
        return Change(
            overrides=overrides,
            plan=plan,
            peak_bytes=prediction.peaks[0].peak_bytes,
            cost=token_seconds / self._token_seconds - 1,
        )


def _without_pins(request: ResolvedRequest, pins: Sequence[str]) -> ResolvedRequest:
    changes: dict[str, object] = dict.fromkeys(pins)
    if "batch" in changes:
        changes["batch"] = BatchRequest()
    return request.model_copy(update=changes)
