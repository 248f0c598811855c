"""Advises when nothing fits: by how much, and the cheapest changes that would make a plan fit."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from math import ceil
from typing import Literal

from windlass.cost import ArrayClock
from windlass.planner.advice.alternatives import alternatives
from windlass.planner.advice.offload_feasibility import tier_shortages
from windlass.planner.advice.shortfall import ClosestPlan, shortfall
from windlass.planner.advice.single_changes import open_pins
from windlass.planner.result import Advice, Change, EvaluatedPlan, InfeasiblePlan, TierShortage
from windlass.planner.search.evaluate import evaluate, training_state_bytes
from windlass.planner.search.fastest import fastest_plans
from windlass.planner.space.options import (
    offload_tiers,
    open_precisions,
    smaller_moments,
    vary,
)
from windlass.planner.space.plan_space import PlanSpace
from windlass.schema import OWN_STACK, Plan, ResolvedRequest, ShardingDegrees

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
    *,
    looks_for_changes: bool = True,
) -> Advice:
    """Advises on a request that does not fit.

    Args:
        infeasible: the plans that come nearest to fitting, nearest first.
        closest: the plan in phases that comes nearest to fitting; None if there is none.
        looks_for_changes: whether to search for changes that would make it fit.
    """
    advisor = _Advisor(space, infeasible, budget_bytes)
    return advisor.advice(closest, advisor.changes() if looks_for_changes else None)


class _Advisor:
    def __init__(
        self, space: PlanSpace, infeasible: Sequence[InfeasiblePlan], budget_bytes: int
    ) -> None:
        self._space, self._request = space, space.request
        self._infeasible, self._budget_bytes = infeasible, budget_bytes
        self._nearest = infeasible[0].plan
        clock = ArrayClock(space.base, space.graph, space.machine)
        prediction = evaluate(self._nearest, clock, budget_bytes=budget_bytes)
        self._token_seconds = prediction.step_seconds / prediction.tokens_per_step
        """What the cost of a change is stated against."""
        self._where: Literal["memory"] | None = None if space.machine.devices == 1 else "memory"
        """Where a change is tried: what several devices lack in phases, `shortfall` says."""

    def changes(self) -> tuple[Change, ...]:
        """Changes of the request that make it fit, the cheapest first."""
        changes = [*self._larger_budget(), *self._smaller_batch()]
        if self._space.machine.devices == 1:
            others = self._alternatives(self._request, MIN_ALTERNATIVES)
            changes += others
            if self._least_state_bytes <= self._free_bytes or offload_tiers(self._space.machine):
                changes += self._shorter(keeps_pins=bool(others))
            changes += self._smaller_moments()
        else:
            changes += self._single_changes()
        return tuple(sorted(changes, key=lambda each: (each.cost, len(each.overrides))))

    def advice(self, closest: ClosestPlan | None, changes: tuple[Change, ...] | None) -> Advice:
        """The advice on the request, with some changes; None if none were looked for."""
        space, first, free_bytes = self._space, self._infeasible[0], self._free_bytes
        is_single, state_bytes = space.machine.devices == 1, self._least_state_bytes
        lacks: tuple[str, ...] = ()
        if not is_single and closest is not None and changes is not None:
            lacks = shortfall(closest, space, self._budget_bytes)
        return Advice(
            budget_bytes=self._budget_bytes,
            needed_bytes=first.peak_bytes,
            nearest=first.plan,
            over_bytes=first.over_bytes,
            by_class=first.by_class,
            nearest_tiers=first.tiers,
            machine_devices=space.machine.devices,
            changes=changes or (),
            state_bytes=state_bytes,
            tier_shortages=self._shortages() if is_single else (),
            devices=ceil(state_bytes / free_bytes) if free_bytes > 0 else None,
            in_phases=lacks,
        )

    @property
    def _free_bytes(self) -> int:
        return self._budget_bytes - self._space.machine.device.process_bytes(compiled=False)

    @cached_property
    def _least_state_bytes(self) -> int:
        return min(self._state_bytes(each.plan) for each in self._infeasible)

    def _state_bytes(self, plan: Plan) -> int:
        """Bytes of weights, gradients and optimizer state of one replica."""
        unsharded = plan.model_copy(update={"sharding": ShardingDegrees()})
        return training_state_bytes(unsharded, self._space.graph) * plan.parallel.tensor

    def _shortages(self) -> tuple[TierShortage, ...]:
        """Offload tiers without room for the model in phases, in any precision."""
        graph, machine = self._space.graph, self._space.machine
        if graph.layers < 2:
            return ()
        bases = [vary(self._nearest, precision=each) for each in open_precisions(machine)]
        return tier_shortages(bases, graph, machine)

    def _larger_budget(self) -> Iterator[Change]:
        """A larger memory budget, if the machine has it."""
        first = self._infeasible[0]
        if first.tiers:
            return
        mebibytes = ceil(first.peak_bytes / _MIB)
        if mebibytes * _MIB <= self._space.machine.device.memory.capacity_bytes:
            yield Change(
                overrides=(f"memory={mebibytes}MiB",),
                plan=first.plan,
                peak_bytes=first.peak_bytes,
                cost=0.0,
            )

    def _smaller_batch(self) -> Iterator[Change]:
        """The largest half, quarter, ... of the batch that fits, if an offload tier is too small.

        What layers pass to the next phase is kept there, for every sequence of a step.
        """
        batch = self._request.train.batch if self._infeasible[0].tiers else 1
        while batch > 1:
            batch //= 2
            train = self._request.train.model_copy(update={"batch": batch})
            best = self._fastest(self._request.model_copy(update={"train": train}))
            if best is not None:
                yield self._change((f"train.batch={batch}",), best)
                return

    def _shorter(self, *, keeps_pins: bool) -> list[Change]:
        """The longest sequence that fits, found by halving; if need be with other pins dropped.

        A shorter sequence never needs more memory. So the shortest is tried first: where not even
        that fits, which is the most work to find out, no other is tried.
        """
        if self._space.graph.examples is not None:
            return []
        lengths = [self._request.train.sequence // 2]
        while lengths[-1] >= 2 * _MIN_SEQUENCE:
            lengths.append(lengths[-1] // 2)
        if lengths[-1] < _MIN_SEQUENCE or not (
            shortest := self._with_sequence(lengths[-1], keeps_pins=keeps_pins)
        ):
            return []
        longer = (self._with_sequence(each, keeps_pins=keeps_pins) for each in lengths[:-1])
        return next(filter(None, longer), shortest)

    def _with_sequence(self, sequence: int, *, keeps_pins: bool) -> list[Change]:
        """The change to a shorter sequence; none if it does not fit."""
        train = self._request.train.model_copy(update={"sequence": sequence})
        shorter = self._request.model_copy(update={"train": train})
        override = f"train.sequence={sequence}"
        best = self._fastest(shorter, self._where)
        if best is not None:
            return [self._change((override,), best)]
        if keeps_pins:
            return []
        return [
            replace(each, overrides=(*each.overrides, override))
            for each in self._alternatives(shorter, 1)[:1]
        ]

    def _single_changes(self) -> list[Change]:
        """On several devices: the cheapest changes of one key with which a plan fits in memory."""
        found = open_pins(self._space, self._budget_bytes)
        changes = [self._change(each.overrides, each.fitting) for each in found if each.fitting]
        if (self._space.machine.stack or OWN_STACK).can.small_moments:
            changes += self._smaller_moments()
        changes += self._shorter(keeps_pins=True)
        return sorted(changes, key=lambda each: each.cost)[:MIN_ALTERNATIVES]

    def _alternatives(self, request: ResolvedRequest, count: int) -> tuple[Change, ...]:
        """Plans of different kinds that fit this budget."""
        graph, machine = self._space.graph, self._space.machine
        base = self._token_seconds
        return alternatives(request, graph, machine, self._budget_bytes, base=base, count=count)

    def _smaller_moments(self) -> Iterator[Change]:
        """Optimizer moments in fewer bits."""
        for moments in smaller_moments(self._request):
            changed = self._request.model_copy(update={"moments": moments})
            best = self._fastest(changed, self._where)
            if best is not None:
                yield self._change((f"moments={moments}",), best)

    def _fastest(
        self, request: ResolvedRequest, where: Literal["memory"] | None = None
    ) -> EvaluatedPlan | None:
        """The fastest plan of another request that fits."""
        space = replace(self._space, request=request)
        found = fastest_plans(space, self._budget_bytes, where=where).best
        return found[0] if found else None

    def _change(self, overrides: tuple[str, ...], fitting: EvaluatedPlan) -> Change:
        plan, prediction = fitting
        token_seconds = prediction.step_seconds / prediction.tokens_per_step
        return Change(
            overrides=overrides,
            plan=plan,
            peak_bytes=prediction.peaks[0].peak_bytes,
            cost=token_seconds / self._token_seconds - 1,
        )
