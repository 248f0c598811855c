"""Predicted timeline of a step, in the form of a measured one."""

from windlass.cost.instruction_time import InstructionCosts
from windlass.cost.simulator.event_simulator import simulate_programs
from windlass.program import Program, memory_profile
from windlass.schema import DeviceTimeline, Graph, Machine, Plan, Timeline


def simulate(plan: Plan, graph: Graph, machine: Machine, programs: tuple[Program, ...]) -> Timeline:
    """Simulates one step: start and end of each instruction, and device memory over time.

    All times are at the pace of the slowest host, which the others wait for.

    Args:
        plan: the plan.
        graph: the graph that it partitions.
        machine: the machine that it runs on.
        programs: programs lowered from the plan, of at least one device of each stage; each gives a
            timeline.
    """
    costs = InstructionCosts(plan, graph, machine)
    spans = simulate_programs(plan, graph, machine, costs, programs)
    pace = machine.straggler_factor(plan.parallel.devices)
    process_bytes = machine.device.process_bytes(compiled=plan.compile)
    lanes = tuple(
        DeviceTimeline(
            device=program.device,
            kinds=tuple(instruction.kind for instruction in program.instructions),
            layers=tuple(instruction.layer for instruction in program.instructions),
            micro_batches=tuple(instruction.micro_batch for instruction in program.instructions),
            starts=tuple(pace * span.start for span in times),
            ends=tuple(pace * span.end for span in times),
            memory_bytes=memory_profile(
                program, plan, graph, runtime_bytes=process_bytes
            ).bytes_by_instruction,
        )
        for program, times in zip(programs, spans, strict=True)
    )
    return Timeline(predicted=True, devices=lanes)
