"""Exchanged: bytes that each device sends to others, by the kind of the instruction that sends.

Collectives run on rings. Of a buffer of B bytes on n devices each sends `(n - 1) / n B` to gather
it from its parts, as much to scatter its sum, and twice that for the sum on all. Only the norm, one
number, and the end of the step are not counted.

Source: Patarasuk & Yuan 2009, JPDC 69(2).
"""

from collections.abc import Iterable

from windlass.program.instruction import Instruction, Kind
from windlass.program.lower import lower
from windlass.program.shards import parts
from windlass.program.sizes import LayerSizes, sizes_of
from windlass.program.ties import loans
from windlass.spec.graph import Graph
from windlass.spec.plan import Plan


def exchanged(plan: Plan, graph: Graph, device: int) -> dict[Kind, int]:
    """Bytes that a device sends in one step, by kind; kinds that send nothing are left out.

    Args:
        plan: the plan.
        graph: that it cuts.
        device: one of the plan's.

    Raises:
        Faults: the plan asks for what this version does not lower.
    """
    return Sent(plan, graph).total(lower(plan, graph)[device].instructions)


class Sent:
    """What each instruction of a plan sends.

    Args:
        plan: the plan.
        graph: that it cuts.
    """

    def __init__(self, plan: Plan, graph: Graph) -> None:
        self._plan = plan
        self._sizes = sizes_of(plan, graph)
        self._lent = {loan.layer: loan.elements for loan in loans(plan, graph)}

    def of(self, instruction: Instruction) -> int:
        """Bytes that one device sends for an instruction."""
        kind, layer, _ = instruction
        if layer is None:
            return 0
        sizes, plan = self._sizes[layer], self._plan
        if kind == "send":
            return sizes.output
        if kind == "lend":
            return self._lent[layer] * plan.weight_bytes
        if kind == "hand over":
            return self._lent[layer] * plan.gradient_bytes
        if kind == "gather":
            return gather_bytes(sizes.weights, plan.sharding.weights)
        if kind == "spread":
            return gather_bytes(sizes.held, parts(plan))
        return self._reduced(sizes) if kind == "reduce" else 0

    def total(self, instructions: Iterable[Instruction]) -> dict[Kind, int]:
        """What the instructions of one device send, by kind."""
        totals: dict[Kind, int] = {}
        for instruction in instructions:
            sent = self.of(instruction)
            if sent:
                totals[instruction.kind] = totals.get(instruction.kind, 0) + sent
        return totals

    def _reduced(self, sizes: LayerSizes) -> int:
        """The sum is scattered over rts' replicas, and each shard summed over r / rts'."""
        degree = self._plan.sharding.optimizer
        scattered = gather_bytes(sizes.gradients, degree) if degree > 1 else 0
        return scattered + all_reduce_bytes(sizes.shard, self._plan.cut.replicas // degree)


def gather_bytes(nbytes: int, ranks: int) -> int:
    """`(n - 1) / n B`: what each of n devices sends to gather B bytes, or to scatter their sum."""
    return nbytes * (ranks - 1) // ranks


def all_reduce_bytes(nbytes: int, ranks: int) -> int:
    """`2 (n - 1) / n B`: what each of n devices sends to have the sum of B bytes on all."""
    return 2 * nbytes * (ranks - 1) // ranks
