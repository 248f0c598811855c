"""Simulate: a plan's programs on a clock become a timeline that a measured one lies beside."""

from windlass.cost.instruction_time import InstructionCosts
from windlass.cost.simulator.event_simulator import simulate_programs
from windlass.program.instruction import Program
from windlass.program.memory.liveness import occupancy
from windlass.schema.graph import Graph
from windlass.schema.machine import Machine
from windlass.schema.plan import Plan
from windlass.schema.prediction import DeviceTimeline, Timeline


def simulate(plan: Plan, graph: Graph, machine: Machine, programs: tuple[Program, ...]) -> Timeline:
    """One predicted step: when each instruction starts and ends, and what memory holds meanwhile.

    All goes at the pace of the slowest host, which the others wait for.

    Args:
        plan: the plan.
        graph: that it cuts.
        machine: that it runs on.
        programs: lowered from the plan, of at least one device of each stage: so many lanes.
    """
    costs = InstructionCosts(plan, graph, machine)
    spans = simulate_programs(plan, graph, machine, costs, programs)
    pace = machine.pace(plan.parallel.devices)
    held = machine.device.process_bytes(compiled=plan.compile)
    lanes = tuple(
        DeviceTimeline(
            device=program.device,
            kinds=tuple(instruction.kind for instruction in program.instructions),
            layers=tuple(instruction.layer for instruction in program.instructions),
            micro_batches=tuple(instruction.micro_batch for instruction in program.instructions),
            starts=tuple(pace * span.start for span in times),
            ends=tuple(pace * span.end for span in times),
            memory_bytes=occupancy(program, plan, graph, runtime_bytes=held).bytes,
        )
        for program, times in zip(programs, spans, strict=True)
    )
    return Timeline(predicted=True, devices=lanes)
