"""Evaluates one plan by a short program: memory and time without all its micro-batches.

If all layers stay on the device, every micro-batch after the first costs the same and the peak is
reached by the second. So a program of three micro-batches tells all about one of a thousand.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from windlass.cost import predict_plan, predict_time, stack_stage_bytes, tier_peaks
from windlass.program import (
    Instruction,
    Program,
    layers_of_stage,
    lower,
    memory_profile,
    plan_layer_sizes,
)
from windlass.schema import Graph, Machine, MemoryClass, Plan, Prediction

_STEADY_MULTIPLE = 3
"""Micro-batches, in multiples of the stages, from which on each further one takes as long."""
_SHORT_MICROBATCHES = 3
"""Micro-batches of a short program: the first, and two whose difference is one more."""


EvaluatedPlan = tuple[Plan, Prediction]
"""A plan and what it is predicted to cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePeak:
    """Device memory at its fullest moment."""

    peak_bytes: int
    by_class: Mapping[MemoryClass, int]
    """Bytes by memory class."""
    index: int
    """Index of the instruction that runs at that moment, in the plan's program."""
    instruction: Instruction


def peak_memory(plan: Plan, graph: Graph, machine: Machine) -> DevicePeak:
    """Peak device memory of a single-stage plan."""
    if machine.stack is not None:
        return fullest_stage_memory(plan, graph, machine)
    short = _shortened(plan, _SHORT_MICROBATCHES)
    program, *_ = lower(short, graph)  # tensor-parallel ranks run the same program
    process_bytes = machine.device.process_bytes(compiled=plan.compile)
    # Rows of an embedding's gradient wait from each of the plan's own micro-batches.
    profile = memory_profile(program, plan, graph, runtime_bytes=process_bytes)
    return DevicePeak(
        peak_bytes=profile.peak_bytes,
        by_class=profile.by_class,
        index=_full_program_index(profile.peak_instruction, plan, program),
        instruction=program.instructions[profile.peak_instruction],
    )


def fullest_stage_memory(plan: Plan, graph: Graph, machine: Machine) -> DevicePeak:
    """Peak device memory of the fullest of several stages."""
    if machine.stack is not None:
        return _fullest_on_stack(plan, graph, machine)
    process_bytes = machine.device.process_bytes(compiled=plan.compile)
    peaks = []
    for program in lower(plan, graph)[:: plan.parallel.tensor * plan.parallel.replicas]:
        profile = memory_profile(program, plan, graph, runtime_bytes=process_bytes)
        peaks.append(
            DevicePeak(
                peak_bytes=profile.peak_bytes,
                by_class=profile.by_class,
                index=profile.peak_instruction,
                instruction=program.instructions[profile.peak_instruction],
            )
        )
    return max(peaks, key=lambda memory: memory.peak_bytes)


def _fullest_on_stack(plan: Plan, graph: Graph, machine: Machine) -> DevicePeak:
    """The same on another stack: at the backward pass of the fullest stage's last layer."""
    stages = stack_stage_bytes(plan, graph, machine)
    sums = [sum(each.values()) for each in stages]
    fullest = sums.index(max(sums))
    layer = layers_of_stage(plan, fullest)[-1]
    return DevicePeak(
        peak_bytes=round(sums[fullest]),
        by_class={name: round(nbytes) for name, nbytes in stages[fullest].items()},
        index=0,
        instruction=Instruction("backward", layer, 0),
    )


def evaluate(plan: Plan, graph: Graph, machine: Machine, *, budget_bytes: int) -> Prediction:
    """The prediction of a plan, with `budget_bytes` as the capacity of device memory."""
    return with_budget(extrapolate(plan, graph, machine), budget_bytes)


def extrapolate(plan: Plan, graph: Graph, machine: Machine) -> Prediction:
    """The prediction of a plan, extrapolated from a few of its micro-batches.

    Once its stages are full, each further p micro-batches take as long as the last.
    """
    batch, stages = plan.batch, plan.parallel.pipeline
    least = _SHORT_MICROBATCHES - 1 if stages == 1 else _STEADY_MULTIPLE * stages
    most = least + stages if stages == 1 else least + 2 * stages
    if batch.accumulation <= most or _grows_per_microbatch(plan):
        return predict_plan(plan, graph, machine)
    fewer, more = (
        plan.model_copy(update={"batch": batch.model_copy(update={"accumulation": count})})
        for count in (least, least + stages)
    )
    programs = lower(more, graph)
    low = predict_time(fewer, graph, machine, lower(fewer, graph))
    high = predict_time(more, graph, machine, programs)
    times = (batch.accumulation - least) / stages - 1
    changes: dict[str, object] = {
        name: _extrapolate_line(getattr(low, name), getattr(high, name), times)
        for name in ("step_seconds", "low_seconds", "high_seconds", "model_flop")
    }
    for name in ("by_term", "by_kind"):
        before, after = getattr(low, name), getattr(high, name)
        changes[name] = {
            key: _extrapolate_line(before.get(key, 0.0), after.get(key, 0.0), times)
            for key in before | after
        }
    if stages > 1 and plan.parallel.schedule == "gpipe":
        programs = lower(plan, graph)  # it keeps every micro-batch alive
    # Rows of an embedding's gradient wait from each of the plan's own micro-batches.
    peaks = tier_peaks(plan, graph, machine, programs)
    if stages == 1:
        peaks = tuple(
            peak.model_copy(
                update={"instruction": _full_program_index(peak.instruction, plan, programs[0])}
            )
            for peak in peaks
        )
    changes["peaks"] = peaks
    changes |= {"plan": plan.label, "tokens_per_step": plan.tokens_per_step}
    if low.offload is not None and high.offload is not None:  # transfers of updates do not grow
        waiting = _extrapolate_line(
            low.offload.exposed_seconds, high.offload.exposed_seconds, times
        )
        changes["offload"] = high.offload.model_copy(update={"exposed_seconds": waiting})
    return high.model_copy(update=changes)


def steady_state_microbatches(plan: Plan) -> Plan:
    """The plan with no more micro-batches than fill its stages as far as they ever are."""
    if plan.parallel.schedule == "gpipe" and plan.parallel.pipeline > 1:
        return plan
    return _shortened(
        plan,
        _SHORT_MICROBATCHES
        if plan.parallel.pipeline == 1
        else _STEADY_MULTIPLE * plan.parallel.pipeline,
    )


def stage_peak_bytes(plan: Plan, graph: Graph, machine: Machine) -> tuple[int, ...]:
    """Peak device memory of each stage, `[stage]`."""
    if machine.stack is not None:
        return tuple(round(sum(each.values())) for each in stack_stage_bytes(plan, graph, machine))
    process_bytes = machine.device.process_bytes(compiled=plan.compile)
    programs = lower(steady_state_microbatches(plan), graph)[
        :: plan.parallel.tensor * plan.parallel.replicas
    ]
    return tuple(
        memory_profile(program, plan, graph, runtime_bytes=process_bytes).peak_bytes
        for program in programs
    )


def run_seconds(prediction: Prediction, steps: int) -> float:
    """Predicted seconds of a run of `steps`, including compilation."""
    return prediction.step_seconds * steps + prediction.compile_seconds


def with_budget(prediction: Prediction, budget_bytes: int) -> Prediction:
    """The prediction with another capacity of device memory, which is the first tier."""
    device, *others = prediction.peaks
    device = device.model_copy(update={"capacity_bytes": budget_bytes})
    return prediction.model_copy(update={"peaks": (device, *others)})


def _shortened(plan: Plan, accumulation: int) -> Plan:
    if _grows_per_microbatch(plan):  # every micro-batch keeps activations for its phase
        return plan
    batch = plan.batch
    few = batch.model_copy(update={"accumulation": min(batch.accumulation, accumulation)})
    return plan.model_copy(update={"batch": few})


def _grows_per_microbatch(plan: Plan) -> bool:
    """Whether each further micro-batch moves something, or keeps it until its phase comes back."""
    return plan.is_offloaded("parameters") or plan.is_offloaded("activations")


def _extrapolate_line(low: float, high: float, times: float) -> float:
    """Linear extrapolation by `times` micro-batches beyond `high`."""
    return high + times * (high - low)


def _full_program_index(index: int, plan: Plan, program: Program) -> int:
    """Index of a short program's instruction in the plan's own program.

    What follows the micro-batches (grad norm, an update for each layer, sync) moves back by those
    left out; what stands in the first micro-batches stays. The last one includes the gradient
    reductions.
    """
    if _grows_per_microbatch(plan):
        return index
    layers = plan.stages[-1].end_layer - plan.stages[0].first_layer
    micros = min(plan.batch.accumulation, _SHORT_MICROBATCHES)
    length = len(program.instructions)
    tail = layers + 1 + (1 if plan.clip else 0)
    tail += sum(instruction.kind == "reduce_grads" for instruction in program.instructions)
    each = (length - tail) // micros
    return index if index < length - tail else index + each * (plan.batch.accumulation - micros)


def training_state_bytes(plan: Plan, graph: Graph) -> int:
    """Weights, gradients and optimizer state of one device, which all exist before the update."""
    sizes = plan_layer_sizes(plan, graph)
    return sum(each.weights + each.gradients + each.optimizer for each in sizes)
