"""Once: a first step alone, with the updates that it puts off done right after it."""

from dataclasses import dataclass

from windlass.cost.step import StepCost
from windlass.cost.streamed import run_once
from windlass.program.instruction import Program
from windlass.program.traffic import Traffic, together
from windlass.spec.graph import Graph
from windlass.spec.machine import Machine
from windlass.spec.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Once:
    """What one step takes that no other follows."""

    seconds: float
    read_bytes: int
    written_bytes: int


def once(plan: Plan, graph: Graph, machine: Machine, program: Program) -> Once:
    """What the first step and its settling take together.

    A step that repeats does the updates of the one before beside its own computing; here they come
    after it, and nothing covers them.

    Args:
        plan: of one stage.
        graph: that it cuts.
        machine: that it runs on.
        program: lowered from the plan.

    Raises:
        KeyError: the machine states no rate for the plan's precision, or for a tier.
    """
    costs = StepCost(plan, graph, machine)
    if not plan.streamed:
        seconds = sum(costs.of(instruction).total for instruction in program.instructions)
        return Once(seconds=seconds, read_bytes=0, written_bytes=0)
    traffic = Traffic(plan, graph)
    first = together(traffic.total(program.instructions, stored=False))
    moved = first.plus(together(traffic.total(program.settle)))
    return Once(
        seconds=run_once(plan, graph, machine, costs, program),
        read_bytes=moved.read,
        written_bytes=moved.written,
    )
