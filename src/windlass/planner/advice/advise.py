"""Advises when nothing fits: by how much, and the cheapest changes that would make a plan fit."""

from collections.abc import Iterator, Sequence
from itertools import combinations, islice
from math import ceil

from windlass.planner.advice.alternatives import alternatives, is_requestable, recompute_overrides
from windlass.planner.advice.offload_feasibility import tier_shortages
from windlass.planner.result import Advice, Change, TierShortage
from windlass.planner.search.extrapolate import (
    DevicePeak,
    EvaluatedPlan,
    evaluate,
    training_state_bytes,
)
from windlass.planner.single_device import search_single_device
from windlass.planner.space.options import precisions, smaller_moments, vary
from windlass.planner.space.phase_space import offload_tiers
from windlass.schema import BatchRequest, Graph, Machine, Plan, ResolvedRequest

MIN_ALTERNATIVES = 3
"""Changes that are named at least, if that many fit."""

_MIN_SEQUENCE = 64
"""Tokens below which a shorter sequence is not worth advising."""

_MIB = 2**20


def advise(
    request: ResolvedRequest,
    graph: Graph,
    machine: Machine,
    refused: Sequence[tuple[Plan, DevicePeak]],
) -> Advice:
    """Advises on a request that does not fit."""
    budget_bytes = request.memory or machine.device.memory.capacity_bytes
    nearest, memory = refused[0]
    state_bytes = min(training_state_bytes(plan, graph) for plan, _ in refused)
    free_bytes = budget_bytes - machine.device.process_bytes(compiled=False)
    prediction = evaluate(nearest, graph, machine, budget_bytes=budget_bytes)
    base = prediction.step_seconds / prediction.tokens_per_step
    changes = list(_budget(memory, nearest, machine))
    if state_bytes <= free_bytes or offload_tiers(machine):
        changes += _changes(request, graph, machine, base, budget_bytes)
    changes += _alternatives(request, graph, machine, base, budget_bytes, changes)
    changes += _with_smaller_moments(request, graph, machine, base, budget_bytes)
    return Advice(
        budget_bytes=budget_bytes,
        needed_bytes=memory.peak_bytes,
        over_bytes=memory.peak_bytes - budget_bytes,
        by_class=memory.by_class,
        changes=tuple(sorted(changes, key=lambda change: (change.cost, len(change.overrides)))),
        state_bytes=state_bytes,
        tier_shortages=_shortages(graph, nearest, machine),
        devices=ceil(state_bytes / free_bytes) if free_bytes > 0 else None,
    )


def _shortages(graph: Graph, nearest: Plan, machine: Machine) -> tuple[TierShortage, ...]:
    """Offload tiers without room for the model in phases, in any precision."""
    if graph.layers < 2:
        return ()
    bases = [vary(nearest, precision=precision) for precision in precisions(machine)]
    return tier_shortages(bases, graph, machine)


def _budget(memory: DevicePeak, nearest: Plan, machine: Machine) -> Iterator[Change]:
    """A larger memory budget, if the machine has it."""
    mebibytes = ceil(memory.peak_bytes / _MIB)
    if mebibytes * _MIB <= machine.device.memory.capacity_bytes:
        yield Change(
            overrides=(f"memory={mebibytes}MiB",),
            plan=nearest,
            peak_bytes=memory.peak_bytes,
            cost=0.0,
        )


def _changes(
    request: ResolvedRequest, graph: Graph, machine: Machine, base: float, budget_bytes: int
) -> Iterator[Change]:
    """Pins to drop, fewest first, and a shorter sequence; no change that contains a smaller one."""
    pins = tuple(_pins(request, machine))
    sufficient: list[frozenset[str]] = []
    for count in range(1, len(pins) + 1):
        for dropped in combinations(pins, count):
            if any(small <= set(dropped) for small in sufficient):
                continue
            fitting = search_single_device(
                _without_pins(request, dropped), graph, machine, budget_bytes
            ).fitting
            requestable = (
                each for each in fitting if is_requestable(each[0]) or "recompute" not in dropped
            )
            for best in islice(requestable, 1):
                sufficient.append(frozenset(dropped))
                yield _change(request, dropped, best, base)
    for dropped in ((), *((pins,) if pins and not sufficient else ())):
        shorter = _shorter(_without_pins(request, dropped), graph, machine, budget_bytes)
        if shorter:
            yield _change(request, dropped, shorter[0], base, sequence=True)
            return


def _alternatives(
    request: ResolvedRequest,
    graph: Graph,
    machine: Machine,
    base: float,
    budget_bytes: int,
    changes: Sequence[Change],
) -> tuple[Change, ...]:
    """More changes, of kinds not named yet, so that `MIN_ALTERNATIVES` fit this budget."""
    within = [change for change in changes if change.peak_bytes <= budget_bytes]
    return alternatives(
        request,
        graph,
        machine,
        budget_bytes,
        base=base,
        count=MIN_ALTERNATIVES,
        already_named=within,
    )


def _with_smaller_moments(
    request: ResolvedRequest, graph: Graph, machine: Machine, base: float, budget_bytes: int
) -> Iterator[Change]:
    """Optimizer moments in fewer bits."""
    for moments in smaller_moments(request.moments):
        other = request.model_copy(update={"moments": moments})
        for plan, prediction in search_single_device(other, graph, machine, budget_bytes).fitting[
            :1
        ]:
            yield Change(
                overrides=(f"moments={moments}",),
                plan=plan,
                peak_bytes=prediction.peaks[0].peak_bytes,
                cost=prediction.step_seconds / prediction.tokens_per_step / base - 1,
            )


def _pins(request: ResolvedRequest, machine: Machine) -> Iterator[str]:
    """Names of the request's pins that could be dropped to save memory."""
    if request.batch.micro is not None or request.batch.accumulation is not None:
        yield "batch"
    if request.recompute is not None:
        yield "recompute"
    if request.precision is not None and len(precisions(machine)) > 1:
        yield "precision"
    if request.compile is not None:
        yield "compile"


def _without_pins(request: ResolvedRequest, pins: Sequence[str]) -> ResolvedRequest:
    changes: dict[str, object] = dict.fromkeys(pins)
    if "batch" in changes:
        changes["batch"] = BatchRequest()
    return request.model_copy(update=changes)


def _shorter(
    request: ResolvedRequest, graph: Graph, machine: Machine, budget_bytes: int
) -> tuple[EvaluatedPlan, ...]:
    """The plans that fit of the longest sequence found by halving."""
    sequence = request.train.sequence // 2
    while sequence >= _MIN_SEQUENCE:
        train = request.train.model_copy(update={"sequence": sequence})
        shorter = request.model_copy(update={"train": train})
        fitting = search_single_device(shorter, graph, machine, budget_bytes).fitting
        if fitting:
            return fitting
        sequence //= 2
    return ()


def _change(
    request: ResolvedRequest,
    dropped: Sequence[str],
    fitting: EvaluatedPlan,
    base: float,
    *,
    sequence: bool = False,
) -> Change:
    """The change that replaces dropped pins by the plan's values; what was open stays open."""
    plan, prediction = fitting
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
    return Change(
        overrides=tuple(overrides),
        plan=plan,
        peak_bytes=prediction.peaks[0].peak_bytes,
        cost=prediction.step_seconds / prediction.tokens_per_step / base - 1,
    )
