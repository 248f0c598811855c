"""Memory: the fullest moment of each tier on its fullest device.

The program says what is alive while each instruction runs; the machine says what the process holds
before any tensor. Nothing is added for holes: `machines.allocator` has blocks mapped one by one, so
that what is resident is what is alive.
"""

from collections.abc import Iterator

from windlass.program.device_mesh import mesh_coord
from windlass.program.instruction import Program
from windlass.program.memory.liveness import occupancy
from windlass.program.memory.offloaded_bytes import far_bytes
from windlass.schema.graph import Graph
from windlass.schema.machine import Machine
from windlass.schema.plan import Plan
from windlass.schema.prediction import TierPeak


def tier_peaks(
    plan: Plan, graph: Graph, machine: Machine, programs: tuple[Program, ...]
) -> tuple[TierPeak, ...]:
    """The peak of each tier on the device where it is highest, the near one first."""
    stages = stage_tier_peaks(plan, graph, machine, programs)
    return tuple(
        max((tiers[at] for tiers in stages), key=lambda peak: peak.peak_bytes)
        for at in range(len(machine.device.tiers))
    )


def stage_tier_peaks(
    plan: Plan, graph: Graph, machine: Machine, programs: tuple[Program, ...]
) -> tuple[tuple[TierPeak, ...], ...]:
    """The peak of each tier, the near one first, on one device of each stage.

    Args:
        plan: the plan.
        graph: that it cuts.
        machine: that it runs on.
        programs: of at least one device of each stage.
    """
    held = machine.device.process_bytes(compiled=plan.compile)
    first = {mesh_coord(each.device, plan.parallel).stage: each for each in reversed(programs)}
    return tuple(
        tuple(_stage(first[stage], plan, graph, machine, held, stage)) for stage in sorted(first)
    )


def _stage(
    program: Program, plan: Plan, graph: Graph, machine: Machine, held: int, stage: int
) -> Iterator[TierPeak]:
    near, *others = machine.device.tiers
    full = occupancy(program, plan, graph, runtime_bytes=held)
    yield TierPeak(
        tier=near.name,
        capacity_bytes=near.capacity_bytes,
        peak_bytes=full.peak_bytes,
        by_class=full.by_class,
        instruction=full.peak,
    )
    far = far_bytes(plan, graph, stage)
    for tier in others:
        by_class = far.get(tier.name, {})
        yield TierPeak(
            tier=tier.name,
            capacity_bytes=tier.capacity_bytes,
            peak_bytes=sum(by_class.values()),
            by_class=dict(by_class),
            instruction=0,
        )
