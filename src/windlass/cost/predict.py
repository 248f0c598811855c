"""Predicted time and memory of one step of a plan."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from math import exp, hypot
from operator import attrgetter
from typing import NamedTuple

from windlass.cost.clock.array_clock import ArrayClock
from windlass.cost.clock.plan_columns import PlanColumns
from windlass.cost.clock.step_walk import EXCHANGE_WAITS
from windlass.cost.compiled_code import compile_seconds
from windlass.cost.instruction_time import InstructionCosts
from windlass.cost.op_time import TERMS, TermSeconds
from windlass.cost.peak_memory import moves_each_micro_batch, shortened, stage_tier_peaks
from windlass.cost.simulator.event_simulator import simulate_programs
from windlass.cost.simulator.offload_queue import (
    InstructionSpan,
    OffloadQueue,
    step_seconds,
    transfer_seconds,
)
from windlass.program import (
    MATCHING_RECEIVE,
    TRANSFER_KINDS,
    Instruction,
    InstructionKind,
    Program,
    TierTraffic,
    lower_stage,
    lower_stages,
    sum_tiers,
)
from windlass.schema import (
    DEVIATIONS_OF_80_PERCENT,
    Graph,
    Machine,
    OffloadTraffic,
    Plan,
    Prediction,
)

_MODEL_ERROR = 0.12
"""Standard deviation of log(measured / predicted) that comes from the formulas, not from noise.

Eight plans of seeds 0 and 101 of `windlass validate here` on 2 cores of an AMD EPYC, which others
used too, 2026-11-22: 4 to 15 % off, the root mean square is 0.11.
"""

_WAITING = "waiting for offload"
_EXCHANGE = "communication and waiting"
_STRAGGLERS = "waiting for the slowest host"
_HOST = "host between steps"

_STATE_KINDS: tuple[InstructionKind, ...] = ("grad_norm", "update", "all_gather_params", "sync")
"""Instructions that follow the passes of a step."""
_ROUNDING = 1e-9
"""Share of a step below which what is left of it is no waiting."""

_PUBLISHED_NOISE = 0.15
"""Noise assumed for a machine that was not measured: its curves come from two published figures."""


def predict_plan(
    plan: Plan,
    graph: Graph,
    machine: Machine,
    programs: tuple[Program, ...] = (),
    clock: ArrayClock | None = None,
) -> Prediction:
    """Predicts a plan's step: time by term and instruction kind, memory by tier and class.

    Args:
        programs: programs lowered from the plan; none lowers as much of it as memory depends on.
        clock: prices plans of the same model and machine; None makes one.

    Raises:
        InputErrors: the plan asks for what this version cannot lower.
        KeyError: the machine states no rate for the plan's precision.
    """
    stages = stage_tier_peaks(plan, graph, machine, programs)
    peaks = tuple(max(tier, key=attrgetter("peak_bytes")) for tier in zip(*stages, strict=True))
    return predict_time(plan, graph, machine, programs, clock).model_copy(update={"peaks": peaks})


def predict_time(
    plan: Plan,
    graph: Graph,
    machine: Machine,
    programs: tuple[Program, ...] = (),
    clock: ArrayClock | None = None,
) -> Prediction:
    """The same prediction without peak memory.

    The array clock gives the time; the event simulator does if more than optimizer state is
    offloaded.
    """
    costs = InstructionCosts(plan, graph, machine)
    if moves_each_micro_batch(plan):
        programs = programs or lower_stages(plan, graph)
        totals = simulated_totals(plan, graph, machine, costs, programs)
    else:
        totals = clock_totals(plan, clock or ArrayClock(plan, graph, machine), costs)
    by_kind, by_term, offload = totals
    stragglers = (machine.straggler_factor(plan.parallel.devices) - 1) * sum(by_kind.values())
    for name, more in ((_STRAGGLERS, stragglers), (_HOST, machine.fixed_seconds)):
        if more:
            by_kind[name] = by_term[name] = more
    seconds = sum(by_kind.values())
    spread = exp(DEVIATIONS_OF_80_PERCENT * _deviation(machine, has_experts=bool(graph.experts)))
    micros = plan.batch.accumulation * plan.parallel.data
    rate = machine.device.rate(plan.precision)
    return Prediction(
        plan=plan.label,
        machine=machine.label,
        step_seconds=seconds,
        low_seconds=seconds / spread,
        high_seconds=seconds * spread,
        by_term=by_term,
        by_kind=by_kind,
        peaks=(),
        tokens_per_step=plan.global_batch if graph.examples else plan.tokens_per_step,
        unit=graph.examples.noun if graph.examples else None,
        model_flop=micros * graph.micro_batch_flop(plan.batch.micro, plan.batch.sequence),
        peak_flop_rate=rate.peak * plan.parallel.devices,
        compile_seconds=compile_seconds(plan, graph, machine),
        offload=offload,
    )


def simulated_seconds(
    plan: Plan,
    graph: Graph,
    machine: Machine,
    costs: InstructionCosts,
    programs: tuple[Program, ...],
) -> float:
    """Seconds of a step by the event simulator, the same as those of `predict_time`.

    Args:
        programs: programs of at least one device of each stage.
    """
    every = simulate_programs(plan, graph, machine, costs, programs)
    ends = map(step_seconds, programs, every)
    return max(ends) * machine.straggler_factor(plan.parallel.devices) + machine.fixed_seconds


def _deviation(machine: Machine, *, has_experts: bool) -> float:
    """Standard deviation of log(step time) around the prediction.

    Measured on runs of the stack, else of such machines, if these state it; else noise and model
    error together.
    """
    if machine.stack and (known := machine.stack.step_deviation(has_experts=has_experts)):
        return known
    if machine.deviation is not None:
        return machine.deviation
    noise = _PUBLISHED_NOISE if machine.noise is None else machine.noise
    return hypot(noise, _MODEL_ERROR)


_Work = tuple[str, TermSeconds, float]
"""Kind of an instruction, its own seconds by term, and those of its communication."""


class StepTotals(NamedTuple):
    """Seconds of a step on the device that finishes last, if all hosts are equally fast."""

    by_kind: dict[str, float]
    """By kind of instruction."""
    by_term: dict[str, float]
    offload: OffloadTraffic | None


def clock_totals(plan: Plan, clock: ArrayClock, costs: InstructionCosts) -> StepTotals:
    """Seconds of a step by the array clock, of a plan that offloads no more than optimizer state.

    Instructions take what they take alone; the rest of the time a device waits.
    """
    graph, machine = clock.graph, clock.machine
    ends = clock.stage_ends(PlanColumns.of((plan,)))
    stage = _last(ends.end[:, 0].tolist())
    end, passed, met, waited = (float(each[stage, 0]) for each in ends[:4])
    exchanged = dict(zip(EXCHANGE_WAITS, ends.exchanged[:, stage, 0].tolist(), strict=True))
    # All micro-batches but the first take the same, so two tell of all.
    program = lower_stage(shortened(plan, max(2, plan.parallel.pipeline)), graph, stage)
    passes, state, updates = _works(plan, machine, costs, program)
    left = end - met - _seconds(state)
    updating = min(max(left, 0.0), _seconds(updates)) if _updates_block(machine) else 0.0
    share = updating / _seconds(updates) if updating else 0.0
    by_kind: dict[str, float] = defaultdict(float)
    worked: dict[TermSeconds, float] = defaultdict(float)
    exchanging = 0.0
    works: list[tuple[_Work, float]] = [*passes.items(), *state.items()]
    works += [(each, share * times) for each, times in updates.items()] if updating else []
    for (kind, seconds, exchange), times in works:
        by_kind[kind] += times * (seconds.total + exchange)
        worked[seconds] += times
        exchanging += times * exchange
    received = passed - waited - sum(exchanged.values()) - _seconds(passes)
    waits = {"receive": received, "grad_norm": met - passed, **exchanged}
    if plan.offloads:
        waited += max(0.0, left - updating)
    else:
        waits["update"] = left
    for kind, waiting in waits.items():
        if waiting > _ROUNDING * end:
            by_kind[kind] += waiting
            exchanging += waiting
    if not plan.offloads:
        return _totals(by_kind, worked, {_EXCHANGE: exchanging}, None)
    queue = OffloadQueue(plan, graph, machine, costs, program.device)
    moves = [each for each in program.instructions if each.kind == "update"]
    spans = tuple(queue.schedule(each, 0.0)[0] for each in moves)
    moving = sum(span.end - span.start for span in spans)
    offload = _offload_traffic(plan, graph, program, moving, waited)
    return _totals(by_kind, worked, {_WAITING: waited, _EXCHANGE: exchanging}, offload)


def _last(ends: Sequence[float]) -> int:
    """The first stage that ends as late as any, but for rounding."""
    latest = max(ends) * (1 - _ROUNDING)
    return next(stage for stage, end in enumerate(ends) if end >= latest)


def _works(
    plan: Plan, machine: Machine, costs: InstructionCosts, program: Program
) -> tuple[Counter[_Work], Counter[_Work], Counter[_Work]]:
    """What instructions take that do not wait, and how often: of passes, of the state after them.

    Updates of offloaded state, which run in the background, come last.
    """
    found: tuple[Counter[_Work], Counter[_Work], Counter[_Work]]
    found = Counter(), Counter(), Counter()
    in_turn = machine.execution_model == "bulk-synchronous"
    for each in program.instructions:
        if each.micro_batch is not None and each.micro_batch > 1:
            continue
        kind, exchange = each.kind, costs.communication_seconds(each)
        if kind in MATCHING_RECEIVE.values():
            exchange = 0.0
        elif kind in MATCHING_RECEIVE and not in_turn:  # the device goes on meanwhile
            continue
        place = 2 if _runs_in_background(plan, each) else 1 if kind in _STATE_KINDS else 0
        exchange -= costs.communication.overlapped_seconds(each)
        times = plan.batch.accumulation - 1 if each.micro_batch == 1 else 1
        found[place][kind, costs.terms(each, program.device), exchange] += times
    return found


def _seconds(works: Mapping[_Work, int]) -> float:
    return sum(times * (work.total + exchange) for (_, work, exchange), times in works.items())


def simulated_totals(
    plan: Plan,
    graph: Graph,
    machine: Machine,
    costs: InstructionCosts,
    programs: tuple[Program, ...],
) -> StepTotals:
    """The same totals by the event simulator.

    Sends and transfers count only for the time in which the device does nothing else meanwhile.

    Args:
        programs: programs of at least one device of each stage.
    """
    every = simulate_programs(plan, graph, machine, costs, programs)
    last = _last([spans[-1].start for spans in every])  # all end with the same `sync`
    program, spans = programs[last], every[last]
    by_kind: dict[str, float] = defaultdict(float)
    worked: dict[TermSeconds, float] = defaultdict(float)
    waiting, exchanging = 0.0, 0.0
    # Updates of offloaded state run beside the passes, unless both take the same cores.
    updates_block = _updates_block(machine)
    updates: list[TermSeconds] = []
    done, end = 0.0, step_seconds(program, spans)
    starts = _next_starts(plan, program, spans, end)
    for instruction, span, next_start in zip(program.instructions, spans, starts, strict=True):
        work = costs.terms(instruction, program.device)
        if _runs_in_background(plan, instruction):
            updates += [work] if updates_block and instruction.kind == "update" else []
            continue
        # A message may leave after the device has gone on: it takes none of the device's time.
        start, until = min(span.start, next_start), min(span.end, next_start)
        gap = max(0.0, start - done)
        for update in updates:
            exposed = min(gap, update.total)
            by_kind["update"] += exposed
            worked[update] += exposed / update.total if update.total else 0.0
            gap -= exposed
        updates.clear()
        waiting += gap
        seen = max(0.0, until - max(start, done))
        by_kind[instruction.kind] += seen
        worked[work] += min(1.0, seen / work.total) if work.total else 0.0
        exchanging += max(0.0, seen - work.total)
        done = max(done, until)
    if plan.parallel.devices == 1:  # what is left beside its own work is rounding
        waiting, exchanging = waiting + exchanging, 0.0
    offload = None
    if plan.offloads:
        seconds = transfer_seconds(program, spans)
        offload = _offload_traffic(plan, graph, program, seconds, waiting)
    return _totals(by_kind, worked, {_WAITING: waiting, _EXCHANGE: exchanging}, offload)


def _totals(
    by_kind: Mapping[str, float],
    worked: Mapping[TermSeconds, float],
    waits: Mapping[str, float],
    offload: OffloadTraffic | None,
) -> StepTotals:
    waiting = {_WAITING: waits[_WAITING]} if waits.get(_WAITING) else {}
    by_term: dict[str, float] = {
        term: sum(times * seconds[at] for seconds, times in worked.items())
        for at, term in enumerate(TERMS)
    }
    by_term.update(waits)
    shown = {term: value for term, value in by_term.items() if value}
    return StepTotals(dict(by_kind) | waiting, shown, offload)


def _offload_traffic(
    plan: Plan, graph: Graph, program: Program, seconds: float, exposed: float
) -> OffloadTraffic:
    """What moves between tiers in this many seconds, of which a device waits for some."""
    traffic = sum_tiers(TierTraffic(plan, graph).total(program.instructions))
    return OffloadTraffic(
        read_bytes=traffic.read,
        written_bytes=traffic.written,
        seconds=seconds,
        exposed_seconds=exposed,
    )


def _updates_block(machine: Machine) -> bool:
    """Whether a device waits while state on another tier is updated."""
    return machine.device.kind == "cpu" or not machine.overlaps_transfers


def _next_starts(
    plan: Plan, program: Program, spans: tuple[InstructionSpan, ...], end: float
) -> list[float]:
    """For each instruction, when the device starts the next one that is no background transfer."""
    starts, following = [end] * len(spans), end
    for index in range(len(spans) - 1, -1, -1):
        starts[index] = following
        if not _runs_in_background(plan, program.instructions[index]):
            following = min(spans[index].start, end)
    return starts


def _runs_in_background(plan: Plan, instruction: Instruction) -> bool:
    """Whether a transfer queue runs it, and the device goes on meanwhile."""
    moves = instruction.kind in TRANSFER_KINDS and plan.offloads
    return moves and (instruction.kind != "update" or plan.is_offloaded("optimizer"))
