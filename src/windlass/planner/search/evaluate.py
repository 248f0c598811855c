"""Evaluates one plan: its prediction, and its stages' memory by programs of few micro-batches."""

from collections.abc import Sequence

from windlass.cost import (
    predict_plan,
    stack_stage_bytes,
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


def evaluate(plan: Plan, graph: Graph, machine: Machine, *, budget_bytes: int) -> Prediction:
    """The prediction of a plan, with `budget_bytes` as the capacity of device memory."""
    return with_budget(predict_plan(plan, graph, machine), budget_bytes)


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

    On another stack the fullest moment is the backward pass of the stage's last layer.
    """
    if machine.stack is not None:
        stages = stack_stage_bytes(plan, graph, machine)
        stage = max(range(len(stages)), key=lambda stage: sum(stages[stage].values()))
        by_class = {name: round(nbytes) for name, nbytes in stages[stage].items()}
        peak_bytes = round(sum(stages[stage].values()))
        instruction = Instruction("backward", layers_of_stage(plan, stage)[-1], 0)
    else:
        held = machine.device.process_bytes(compiled=plan.compile)
        # Rows of an embedding's gradient wait from each of the plan's own micro-batches.
        profiles = [
            (memory_profile(program, plan, graph, runtime_bytes=held), program)
            for program in stage_programs(plan, graph)
        ]
        profile, program = max(profiles, key=lambda item: item[0].peak_bytes)
        peak_bytes, by_class = profile.peak_bytes, profile.by_class
        instruction = program.instructions[profile.peak_instruction]
    return InfeasiblePlan(
        plan=plan,
        peak_bytes=peak_bytes,
        over_bytes=peak_bytes - budget_bytes,
        by_class=by_class,
        instruction=instruction,
    )


def training_state_bytes(plan: Plan, graph: Graph) -> int:
    """Weights, gradients and optimizer state of one device, which all exist before the update."""
    sizes = plan_layer_sizes(plan, graph)
    return sum(each.weights + each.gradients + each.optimizer for each in sizes)
