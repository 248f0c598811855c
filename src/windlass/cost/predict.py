"""Predicted time and memory of one step of a plan."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from math import exp, hypot

from windlass.cost.instruction_time import InstructionCosts
from windlass.cost.op_time import TERMS, TermSeconds
from windlass.cost.peak_memory import tier_peaks
from windlass.cost.simulator.event_simulator import simulate_programs
from windlass.cost.simulator.offload_queue import InstructionSpan, step_seconds, transfer_seconds
from windlass.program import (
    TRANSFER_KINDS,
    Instruction,
    Program,
    TierTraffic,
    lower,
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

_MODEL_ERROR = 0.10
"""Standard deviation of log(measured / predicted) that comes from the formulas, not from noise.

Measured on 12 plans on 2 cores of an AMD EPYC (`benchmarks/results/prediction.csv`): the root mean
square of their errors is 0.11, of which the machine's own noise is 0.03.
"""

_WAITING = "waiting for offload"
_EXCHANGE = "communication and waiting"
_STRAGGLERS = "waiting for the slowest host"
_HOST = "host between steps"

_PUBLISHED_NOISE = 0.15
"""Noise assumed for a machine that was not measured: its curves come from two published figures."""


def predict_plan(
    plan: Plan, graph: Graph, machine: Machine, programs: tuple[Program, ...] | None = None
) -> Prediction:
    """Predicts a plan's step: time by term and instruction kind, memory by tier and class.

    Args:
        plan: the plan.
        graph: the graph that it partitions.
        machine: the machine that it runs on.
        programs: programs lowered from the plan; None lowers it.

    Raises:
        InputErrors: the plan asks for what this version cannot lower.
        KeyError: the machine states no rate for the plan's precision.
    """
    programs = programs or lower(plan, graph)
    peaks = tier_peaks(plan, graph, machine, programs)
    return predict_time(plan, graph, machine, programs).model_copy(update={"peaks": peaks})


def predict_time(
    plan: Plan, graph: Graph, machine: Machine, programs: tuple[Program, ...]
) -> Prediction:
    """The same prediction without peak memory."""
    costs = InstructionCosts(plan, graph, machine)
    offload = None
    if plan.parallel.pipeline == 1 and not plan.offloads and not costs.overlaps_reduction:
        by_kind, by_term = _totals_of_equal_instructions(costs, programs[0])
    else:
        devices_per_stage = plan.parallel.tensor * plan.parallel.replicas
        stage_programs = programs[::devices_per_stage]
        spans = simulate_programs(plan, graph, machine, costs, stage_programs)
        last = max(
            range(len(stage_programs)),
            key=lambda index: step_seconds(stage_programs[index], spans[index]),
        )
        program, times = programs[last], spans[last]
        by_kind, by_term = _totals_on_last_device(plan, machine, costs, program, times)
        if plan.offloads:
            traffic = sum_tiers(TierTraffic(plan, graph).total(program.instructions))
            offload = OffloadTraffic(
                read_bytes=traffic.read,
                written_bytes=traffic.written,
                seconds=transfer_seconds(program, times),
                exposed_seconds=by_kind.get(_WAITING, 0.0),
            )
    by_kind, by_term = _at_pace(machine.straggler_factor(plan.parallel.devices), by_kind, by_term)
    if machine.fixed_seconds:
        by_kind |= {_HOST: machine.fixed_seconds}
        by_term |= {_HOST: machine.fixed_seconds}
    seconds = sum(by_kind.values())
    spread = exp(DEVIATIONS_OF_80_PERCENT * _deviation(machine))
    micros = plan.batch.accumulation * plan.parallel.data
    rate = machine.device.rate(plan.precision)
    used = len({span.kind for span in graph.layer_runs})
    return Prediction(
        plan=plan.label,
        machine=machine.label,
        step_seconds=seconds,
        low_seconds=seconds / spread,
        high_seconds=seconds * spread,
        by_term=by_term,
        by_kind=by_kind,
        peaks=(),
        tokens_per_step=plan.tokens_per_step,
        model_flop=micros * graph.micro_batch_flop(plan.batch.micro, plan.batch.sequence),
        peak_flop_rate=rate.peak * plan.parallel.devices,
        compile_seconds=used * machine.device.compile_seconds if plan.compile else 0.0,
        offload=offload,
    )


def _deviation(machine: Machine) -> float:
    """Standard deviation of log(step time) around the prediction.

    Measured on runs of the stack, else of such machines, if these state it; else noise and model
    error together.
    """
    if machine.stack is not None and machine.stack.deviation is not None:
        return machine.stack.deviation
    if machine.deviation is not None:
        return machine.deviation
    noise = _PUBLISHED_NOISE if machine.noise is None else machine.noise
    return hypot(noise, _MODEL_ERROR)


def _at_pace(
    pace: float, by_kind: dict[str, float], by_term: dict[str, float]
) -> tuple[dict[str, float], dict[str, float]]:
    """All times at the pace of the slowest host; waiting for it is a part of its own."""
    if pace == 1:
        return by_kind, by_term
    waiting = {_STRAGGLERS: (pace - 1) * sum(by_kind.values())}
    return by_kind | waiting, by_term | waiting


def _totals_on_last_device(
    plan: Plan,
    machine: Machine,
    costs: InstructionCosts,
    program: Program,
    spans: tuple[InstructionSpan, ...],
) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds by instruction kind and by term on the device that finishes last.

    Sends and transfers count only for the time in which the device does nothing else meanwhile.

    Args:
        plan: the plan.
        machine: the machine that it runs on.
        costs: costs of the plan's instructions.
        program: program of the device.
        spans: start and end of its instructions.
    """
    by_kind: dict[str, float] = defaultdict(float)
    worked: dict[TermSeconds, float] = defaultdict(float)
    waiting, exchanging = 0.0, 0.0
    # Updates of offloaded state run beside the passes, unless both take the same cores.
    updates_block = machine.device.kind == "cpu" or not machine.overlaps_transfers
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
    totals = {_WAITING: waiting, _EXCHANGE: exchanging}
    by_term = _terms(_sum(worked)) | {term: value for term, value in totals.items() if value}
    return dict(by_kind) | ({_WAITING: waiting} if waiting else {}), by_term


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
    moves = plan.offloads and instruction.kind in TRANSFER_KINDS
    return moves and (instruction.kind != "update" or plan.is_offloaded("optimizer"))


def _totals_of_equal_instructions(
    costs: InstructionCosts, program: Program
) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds by instruction kind and term where no device waits for another.

    Instructions follow each other on one device, or on several that all run the same program, so
    equal instructions are counted together.
    """
    counted: Counter[tuple[str, TermSeconds, float]] = Counter()
    for instruction in program.instructions:
        exchange = costs.communication_seconds(instruction)
        counted[instruction.kind, costs.terms(instruction), exchange] += 1
    by_kind: dict[str, float] = defaultdict(float)
    worked: dict[TermSeconds, float] = defaultdict(float)
    exchanging = 0.0
    for (kind, seconds, exchange), times in counted.items():
        by_kind[kind] += times * (seconds.total + exchange)
        exchanging += times * exchange
        worked[seconds] += times
    by_term = _terms(_sum(worked))
    return dict(by_kind), by_term | ({_EXCHANGE: exchanging} if exchanging else {})


def _sum(worked: Mapping[TermSeconds, float]) -> TermSeconds:
    """Sum of pieces of work, each the given number of times."""
    pieces = [seconds.times(times) for seconds, times in worked.items()]
    return TermSeconds(*map(sum, zip(*pieces, strict=True)))


def _terms(seconds: TermSeconds) -> dict[str, float]:
    return {term: value for term, value in zip(TERMS, seconds, strict=True) if value > 0}
