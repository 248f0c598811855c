"""Evaluates one plan: its prediction, and its stages' memory by programs of few micro-batches.

If all layers stay on the device, the peak is reached once the stages are full, so that few
micro-batches tell all about a thousand.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from windlass.cost import (
    predict_plan,
    stack_stage_bytes,
    steady_state_microbatches,
)
from windlass.program import (
    Instruction,
    MemoryProfile,
    Program,
    layers_of_stage,
    lower_stage,
    memory_profile,
    plan_layer_sizes,
)
from windlass.schema import Graph, Machine, MemoryClass, Plan, Prediction

EvaluatedPlan = tuple[Plan, Prediction]
"""A plan and what it is predicted to cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePeak:
    """Device memory at its fullest moment."""

    peak_bytes: int
    by_class: Mapping[MemoryClass, int]
    """Bytes by memory class."""
    instruction: Instruction


def fullest_stage_memory(plan: Plan, graph: Graph, machine: Machine) -> DevicePeak:
    """Peak device memory of the fullest stage."""
    if machine.stack is not None:
        return _fullest_on_stack(plan, graph, machine)
    profiles = _stage_profiles(plan, graph, machine)
    program, profile = max(profiles, key=lambda item: item[1].peak_bytes)
    return DevicePeak(
        peak_bytes=profile.peak_bytes,
        by_class=profile.by_class,
        instruction=program.instructions[profile.peak_instruction],
    )


def _stage_profiles(
    plan: Plan, graph: Graph, machine: Machine
) -> Iterator[tuple[Program, MemoryProfile]]:
    """A program of each stage, of few micro-batches, and its memory."""
    short = steady_state_microbatches(plan)
    process_bytes = machine.device.process_bytes(compiled=plan.compile)
    for stage in range(plan.parallel.pipeline):
        program = lower_stage(short, graph, stage)
        # Rows of an embedding's gradient wait from each of the plan's own micro-batches.
        yield program, memory_profile(program, plan, graph, runtime_bytes=process_bytes)


def _fullest_on_stack(plan: Plan, graph: Graph, machine: Machine) -> DevicePeak:
    """The same on another stack: at the backward pass of the fullest stage's last layer."""
    stages = stack_stage_bytes(plan, graph, machine)
    sums = [sum(each.values()) for each in stages]
    fullest = sums.index(max(sums))
    layer = layers_of_stage(plan, fullest)[-1]
    return DevicePeak(
        peak_bytes=round(sums[fullest]),
        by_class={name: round(nbytes) for name, nbytes in stages[fullest].items()},
        instruction=Instruction("backward", layer, 0),
    )


def evaluate(plan: Plan, graph: Graph, machine: Machine, *, budget_bytes: int) -> Prediction:
    """The prediction of a plan, with `budget_bytes` as the capacity of device memory."""
    return with_budget(predict_plan(plan, graph, machine), budget_bytes)


def stage_peak_bytes(plan: Plan, graph: Graph, machine: Machine) -> tuple[int, ...]:
    """Peak device memory of each stage, `[stage]`."""
    if machine.stack is not None:
        return tuple(round(sum(each.values())) for each in stack_stage_bytes(plan, graph, machine))
    return tuple(profile.peak_bytes for _, profile in _stage_profiles(plan, graph, machine))


def run_seconds(prediction: Prediction, steps: int) -> float:
    """Predicted seconds of a run of `steps`, including compilation."""
    return prediction.step_seconds * steps + prediction.compile_seconds


def with_budget(prediction: Prediction, budget_bytes: int) -> Prediction:
    """The prediction with another capacity of device memory, which is the first tier."""
    device, *others = prediction.peaks
    device = device.model_copy(update={"capacity_bytes": budget_bytes})
    return prediction.model_copy(update={"peaks": (device, *others)})


def training_state_bytes(plan: Plan, graph: Graph) -> int:
    """Weights, gradients and optimizer state of one device, which all exist before the update."""
    sizes = plan_layer_sizes(plan, graph)
    return sum(each.weights + each.gradients + each.optimizer for each in sizes)
