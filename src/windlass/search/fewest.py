"""Fewest: as little is recomputed as makes a plan fit.

Of a stage's layers one after the other is recomputed, in one of two ways: each as a whole; or first
all but large products of each, then, one after the other again, those too. The more of these steps,
the longer a step of training and the smaller what the stage holds, which depends on its own layers
only. So of each way each stage has a fewest number by itself, and of all plans that are the same
but for these numbers the one with all of them smallest is the fastest.
"""

from collections.abc import Sequence

from windlass.program.layout import chunks_of
from windlass.program.legal import selective_faults
from windlass.program.lower import lower
from windlass.program.occupancy import occupancy
from windlass.program.recompute import able, recomputing
from windlass.search.weigh import settled
from windlass.spec.graph import Graph
from windlass.spec.machine import Machine
from windlass.spec.plan import Plan


def fewest(plan: Plan, graph: Graph, machine: Machine, near_bytes: int) -> tuple[Plan, ...]:
    """The plan with as little recomputed on each stage as fits, of each way that there is.

    Args:
        plan: that fits with all layers run again.
        graph: that it cuts.
        machine: that it is for.
        near_bytes: of the near tier.
    """
    ways = (False, True) if not any(selective_faults(plan, graph)) else (False,)
    found = (
        _least(Steps(plan, selects=(way,) * plan.cut.pipeline), graph, machine, near_bytes)
        for way in ways
    )
    return tuple(dict.fromkeys(found))


def _least(steps: "Steps", graph: Graph, machine: Machine, near_bytes: int) -> Plan:
    """Found for all stages at once: without any, else by halving.

    Halving takes for granted that more steps need no more memory. Between none and one that may not
    be so, since what runs again needs room to run in.
    """
    low, high = [0] * len(steps.last), list(steps.last)
    middle = low
    while True:
        for stage, peak in enumerate(stage_peaks(steps.plan(middle), graph, machine)):
            if peak <= near_bytes:
                high[stage] = middle[stage]
            else:
                low[stage] = min(middle[stage] + 1, high[stage])
        if low == high:
            return steps.plan(low)
        middle = [(one + other) // 2 for one, other in zip(low, high, strict=True)]


class Steps:
    """How far the layers of each stage are recomputed, step by step; at 0 none is.

    Args:
        plan: says all the rest.
        selects: of each stage whether large products are kept as long as can be.
    """

    def __init__(self, plan: Plan, *, selects: Sequence[bool]) -> None:
        self._plan, self._selects = plan, tuple(selects)
        self._layers = [
            max(len(able(plan, plan.stages[chunk])) for chunk in chunks_of(plan, stage))
            for stage in range(plan.cut.pipeline)
        ]

    @property
    def last(self) -> tuple[int, ...]:
        """Of each stage the step at which all of its layers run again."""
        return tuple(
            (1 + selects) * count
            for selects, count in zip(self._selects, self._layers, strict=True)
        )

    def plan(self, steps: Sequence[int]) -> Plan:
        """The plan with each stage so far."""
        stages = range(self._plan.cut.pipeline)
        kept = [self._layers[stage] if self._selects[stage] else 0 for stage in stages]
        whole = [max(0, steps[stage] - kept[stage]) for stage in stages]
        selective = [min(steps[stage], kept[stage]) for stage in stages]
        chunks = [chunk % len(stages) for chunk in range(len(self._plan.stages))]
        return recomputing(
            self._plan,
            [whole[stage] for stage in chunks],
            [selective[stage] for stage in chunks],
        )


def stage_peaks(plan: Plan, graph: Graph, machine: Machine) -> tuple[int, ...]:
    """Bytes in the near tier of each stage at its fullest."""
    held = machine.device.process_bytes(compiled=plan.compile)
    short = settled(plan)
    programs = lower(short, graph)[:: plan.cut.tensor * plan.cut.replicas]
    return tuple(
        occupancy(program, short, graph, runtime_bytes=held).peak_bytes for program in programs
    )
