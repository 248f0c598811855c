"""Memory: the fullest moment of each tier on its fullest device.

The program says what is alive while each instruction runs; the machine says what the process holds
before any tensor. Nothing is added for holes: `machines.allocator` has blocks mapped one by one, so
that what is resident is what is alive.
"""

from windlass.program.far import far_bytes
from windlass.program.instruction import Program
from windlass.program.layout import place_of
from windlass.program.occupancy import Occupancy, occupancy
from windlass.spec.graph import Graph
from windlass.spec.machine import Machine, Tier
from windlass.spec.plan import HomeClass, Plan
from windlass.spec.prediction import TierPeak


def peaks(
    plan: Plan, graph: Graph, machine: Machine, programs: tuple[Program, ...]
) -> tuple[TierPeak, ...]:
    """The peak of each tier on the device where it is highest, the near one first."""
    held = machine.device.process_bytes(compiled=plan.compile)
    by_stage: dict[int, Occupancy] = {}
    for program in programs:
        stage = place_of(program.device, plan.cut).stage
        if stage not in by_stage:
            by_stage[stage] = occupancy(program, plan, graph, runtime_bytes=held)
    fullest = max(by_stage.values(), key=lambda full: full.peak_bytes)
    near, *others = machine.device.tiers
    first = TierPeak(
        tier=near.name,
        capacity_bytes=near.capacity_bytes,
        peak_bytes=fullest.peak_bytes,
        by_class=fullest.by_class,
        instruction=fullest.peak,
    )
    far = [far_bytes(plan, graph, stage) for stage in sorted(by_stage)]
    return (first, *(_beyond(tier, [held.get(tier.name, {}) for held in far]) for tier in others))


def _beyond(tier: Tier, held: list[dict[HomeClass, int]]) -> TierPeak:
    """A far tier of the device that has most there."""
    most = max(held, key=lambda by_class: sum(by_class.values()))
    return TierPeak(
        tier=tier.name,
        capacity_bytes=tier.capacity_bytes,
        peak_bytes=sum(most.values()),
        by_class=dict(most),
        instruction=0,
    )
