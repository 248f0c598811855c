"""Evaluates one plan: its prediction, and its stages' memory by programs of few micro-batches."""

from collections.abc import Sequence

from windlass.cost import (
    ArrayClock,
    KeptCode,
    compile_seconds,
    predict_plan,
    stage_programs,
    stage_tier_peaks,
)
from windlass.planner.result import InfeasiblePlan, with_budget
from windlass.program import (
    Instruction,
    Program,
    layers_of_stage,
    memory_profile,
    plan_layer_sizes,
)
from windlass.schema import Graph, Machine, Plan, Prediction


def evaluate(
    plan: Plan, clock: ArrayClock, *, budget_bytes: int, kept_code: KeptCode = frozenset()
) -> Prediction:
    """The prediction of a plan, with `budget_bytes` as the capacity of device memory."""
    graph, machine = clock.graph, clock.machine
    prediction = with_budget(predict_plan(plan, graph, machine, clock=clock), budget_bytes)
    seconds = compile_seconds(plan, graph, machine, kept_code)
    return prediction.model_copy(update={"compile_seconds": seconds})


def stage_peak_bytes(
    plan: Plan, graph: Graph, machine: Machine, programs: Sequence[Program] = ()
) -> tuple[int, ...]:
    """Peak device memory of each stage, `[stage]`; by programs of few micro-batches if none."""
    stages = stage_tier_peaks(plan, graph, machine, programs)
    return tuple(tiers[0].peak_bytes for tiers in stages)


def infeasible_plan(
    plan: Plan, graph: Graph, machine: Machine, budget_bytes: int
) -> InfeasiblePlan:
    """A plan with the peak of its fullest stage, and what exceeds the budget then.

    On another stack without phases the fullest moment is the backward pass of the stage's last
    layer.
    """
    has_program = machine.stack is None or plan.is_offloaded("parameters")
    programs = stage_programs(plan, graph) if has_program else ()
    peaks = [tiers[0] for tiers in stage_tier_peaks(plan, graph, machine, programs)]
    stage = max(range(len(peaks)), key=lambda stage: peaks[stage].peak_bytes)
    if not has_program:
        instruction = Instruction("backward", layers_of_stage(plan, stage)[-1], 0)
    else:
        profile = memory_profile(programs[stage], plan, graph, runtime_bytes=0)
        instruction = programs[stage].instructions[profile.peak_instruction]
    return InfeasiblePlan(
        plan=plan,
        peak_bytes=peaks[stage].peak_bytes,
        over_bytes=peaks[stage].peak_bytes - budget_bytes,
        by_class=peaks[stage].by_class,
        instruction=instruction,
    )


def training_state_bytes(plan: Plan, graph: Graph) -> int:
    """Weights, gradients and optimizer state of one device, which all exist before the update."""
    sizes = plan_layer_sizes(plan, graph)
    return sum(each.weights + each.gradients + each.optimizer for each in sizes)
