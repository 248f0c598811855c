"""Exchanged: bytes that each device sends to others, by the kind of the instruction that sends.

Collectives run on rings, and so do those of a layer's slices inside its passes. Of a buffer of B
bytes on n devices each sends `(n - 1) / n B` to gather it from its parts, as much to scatter its
sum, and twice that for the sum on all. Only the norm, one number, and the end of the step are not
counted.

Source: Patarasuk & Yuan 2009, JPDC 69(2).
"""

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from windlass.program.activation_checkpointing import selected
from windlass.program.device_mesh import mesh_coord
from windlass.program.instruction import Instruction, InstructionKind
from windlass.program.lowering.lower import lower
from windlass.program.memory.layer_sizes import StateSizes, states_of
from windlass.program.tensor_parallel import ops_of
from windlass.program.tied_weights import loans
from windlass.program.zero_sharding import parts
from windlass.schema.graph import Collective, Graph
from windlass.schema.plan import Plan
from windlass.schema.tensor_grid import TensorAxis, group_size

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Count = TypeVar("Count", int, "npt.NDArray[np.int64]")
"""A number, or one for each of many."""

COMMON: Mapping[TensorAxis, str] = MappingProxyType(
    {"all": "common", "tokens": "common_in_columns", "features": "common_in_rows"}
)
"""Which slices have what `StateSizes` names in common."""


def exchanged(plan: Plan, graph: Graph, device: int) -> dict[InstructionKind, int]:
    """Bytes that a device sends in one step, by kind; kinds that send nothing are left out.

    Args:
        plan: the plan.
        graph: that it cuts.
        device: one of the plan's.

    Raises:
        Faults: the plan asks for what this version does not lower.
    """
    sent = Sent(plan, graph, mesh_coord(device, plan.parallel).tensor_rank)
    return sent.total(lower(plan, graph)[device].instructions)


class Inside(NamedTuple):
    """A collective of a layer's slices inside a pass."""

    how: Collective
    among: TensorAxis
    """Which slices."""
    sent: int
    """Bytes that one device sends."""


class Sent:
    """What each instruction of a plan sends.

    Args:
        plan: the plan.
        graph: that it cuts.
        index: of the device's slice; the first is the largest.
    """

    def __init__(self, plan: Plan, graph: Graph, index: int = 0) -> None:
        self._plan = plan
        self._states = states_of(plan, graph, index)
        self._kinds = tuple(graph.shard(plan.parallel.tensor, index).layer_kinds())
        self._selective = selected(plan)
        self._inside: dict[tuple[InstructionKind, str, bool], tuple[Inside, ...]] = {}
        self._lent = {loan.user_layer: loan.elements for loan in loans(plan, graph, index)}

    def of(self, instruction: Instruction) -> int:
        """Bytes that one device sends for an instruction."""
        kind, layer, _ = instruction
        if layer is None:
            return 0
        sizes, plan = self._states[layer], self._plan
        if kind == "send":
            return self._output(layer)
        if kind == "send_tied_weights":
            return self._lent[layer] * plan.weight_bytes
        if kind == "send_tied_grads":
            return self._lent[layer] * plan.gradient_bytes
        if kind == "unshard_weights":
            return gather_bytes(sizes.weights, plan.sharding.parameters)
        if kind == "all_gather_params":
            return gather_bytes(sizes.held, parts(plan))
        if kind == "reduce_grads":
            return self._reduced(sizes)
        return sum(each.sent for each in self.inside(instruction))

    def inside(self, instruction: Instruction) -> tuple[Inside, ...]:
        """The collectives of a layer's slices inside a pass."""
        kind, layer, _ = instruction
        if layer is None or self._plan.parallel.tensor == 1:
            return ()
        key = kind, self._kinds[layer].name, layer in self._selective
        if key not in self._inside:
            self._inside[key] = tuple(self._exchanges(kind, layer))
        return self._inside[key]

    def total(self, instructions: Iterable[Instruction]) -> dict[InstructionKind, int]:
        """What the instructions of one device send, by kind."""
        totals: dict[InstructionKind, int] = {}
        for instruction in instructions:
            sent = self.of(instruction)
            if sent:
                totals[instruction.kind] = totals.get(instruction.kind, 0) + sent
        return totals

    def _output(self, layer: int) -> int:
        batch = self._plan.batch
        cost = self._kinds[layer].cost(self._plan.precision, compiled=self._plan.compile)
        return round(cost.output_bytes.at(batch.micro, batch.sequence))

    def _reduced(self, sizes: StateSizes) -> int:
        """What of whole parameters is summed over slices, and all of it over replicas.

        That sum is scattered over rts' replicas, and each shard summed over r / rts'.
        """
        degree = self._plan.sharding.optimizer
        summed = sum(sent for _, sent in common_sums(sizes, self._plan))
        scattered = gather_bytes(sizes.gradients, degree) if degree > 1 else 0
        return (
            summed + scattered + all_reduce_bytes(sizes.shard, self._plan.parallel.data // degree)
        )

    def _exchanges(self, kind: InstructionKind, layer: int) -> Iterator[Inside]:
        plan, known = self._plan, self._kinds[layer]
        cost = known.cost(plan.precision, compiled=plan.compile, selective=layer in self._selective)
        for op in ops_of(kind, known, cost, first=layer == 0):
            if op.exchange is not None:
                how, buffer, among = op.exchange
                nbytes = round(buffer.at(plan.batch.micro, plan.batch.sequence))
                ranks = group_size(plan.parallel.tensor, among)
                yield Inside(how, among, collective_bytes(how, nbytes, ranks))


def common_sums(sizes: StateSizes, plan: Plan) -> tuple[tuple[TensorAxis, int], ...]:
    """What one device sends so that gradients of what slices have in common are whole.

    Args:
        sizes: of the layer.
        plan: the plan.

    Returns:
        Which slices sum, and the bytes; only those that have something in common.
    """
    sums = (
        (among, all_reduce_bytes(getattr(sizes, name), group_size(plan.parallel.tensor, among)))
        for among, name in COMMON.items()
    )
    return tuple((among, sent) for among, sent in sums if sent)


def collective_bytes(how: Collective, nbytes: Count, ranks: Count) -> Count:
    """What each of n devices sends for a collective over B bytes."""
    return (all_reduce_bytes if how == "all_reduce" else gather_bytes)(nbytes, ranks)


def gather_bytes(nbytes: Count, ranks: Count) -> Count:
    """`(n - 1) / n B`: what each of n devices sends to gather B bytes, or to scatter their sum."""
    return nbytes * (ranks - 1) // ranks


def all_reduce_bytes(nbytes: Count, ranks: Count) -> Count:
    """`2 (n - 1) / n B`: what each of n devices sends to have the sum of B bytes on all."""
    return 2 * nbytes * (ranks - 1) // ranks
