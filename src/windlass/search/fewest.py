"""Fewest: as few layers run again as make a plan fit.

A step takes the longer, the more layers run again, and what a stage holds depends on its own layers
only. So each stage has a smallest number by itself, and of all plans that are the same but for
these numbers the one with all of them smallest is the fastest.
"""

from collections.abc import Sequence

from windlass.program.layout import chunks_of
from windlass.program.lower import lower
from windlass.program.occupancy import occupancy
from windlass.program.recompute import able, recomputing
from windlass.search.weigh import settled
from windlass.spec.graph import Graph
from windlass.spec.machine import Machine
from windlass.spec.plan import Plan


def fewest(plan: Plan, graph: Graph, machine: Machine, near_bytes: int) -> Plan:
    """The plan with as few layers of each stage run again as fit, found by halving.

    Args:
        plan: that fits with all of them run again.
        graph: that it cuts.
        machine: that it is for.
        near_bytes: of the near tier.
    """
    most = [_most(plan, graph, stage) for stage in range(plan.cut.pipeline)]
    low, high = [0] * len(most), list(most)
    while low != high:
        middle = [(one + other) // 2 for one, other in zip(low, high, strict=True)]
        tried = _counted(plan, graph, middle)
        for stage, peak in enumerate(stage_peaks(tried, graph, machine)):
            if peak <= near_bytes:
                high[stage] = middle[stage]
            else:
                low[stage] = min(middle[stage] + 1, high[stage])
    return _counted(plan, graph, low)


def stage_peaks(plan: Plan, graph: Graph, machine: Machine) -> tuple[int, ...]:
    """Bytes in the near tier of each stage at its fullest."""
    held = machine.device.process_bytes(compiled=plan.compile)
    short = settled(plan)
    programs = lower(short, graph)[:: plan.cut.tensor * plan.cut.replicas]
    return tuple(
        occupancy(program, short, graph, runtime_bytes=held).peak_bytes for program in programs
    )


def _most(plan: Plan, graph: Graph, stage: int) -> int:
    """Layers that can run again in the longest chunk of a stage."""
    return max(len(able(plan, graph, plan.stages[chunk])) for chunk in chunks_of(plan, stage))


def _counted(plan: Plan, graph: Graph, counts: Sequence[int]) -> Plan:
    """The plan with so many layers of each chunk of each stage run again."""
    stages = plan.cut.pipeline
    return recomputing(plan, graph, [counts[chunk % stages] for chunk in range(len(plan.stages))])
