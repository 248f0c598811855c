"""Communication volume: bytes that each device sends to others in a step, by instruction kind.

Collectives use rings, inside the passes of a tensor-parallel layer too. For a buffer of B bytes on
n devices each device sends `(n - 1) / n B` in an all-gather or a reduce-scatter, and twice that in
an all-reduce. In an all-to-all of tokens it sends `(n - 1) / n B` too, if all experts get equally
many. The gradient norm, one number, and the end of the step are not counted.

Source: Patarasuk & Yuan 2009, JPDC 69(2).
"""

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from windlass.program.activation_checkpointing import selective_layers
from windlass.program.instruction import Instruction, InstructionKind
from windlass.program.memory.layer_sizes import StateSizes, plan_state_sizes
from windlass.program.replicas.context_parallel import micro_of_rank
from windlass.program.replicas.expert_parallel import rank_kinds
from windlass.program.replicas.zero_sharding import updates_per_shard
from windlass.program.tensor_parallel import has_collectives, pass_ops
from windlass.program.tied_weights import tied_across_stages
from windlass.schema import (
    Collective,
    CollectiveAxis,
    CollectiveKind,
    Graph,
    LayerKind,
    Op,
    Plan,
    TensorAxis,
    group_size,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_Count = TypeVar("_Count", int, "npt.NDArray[np.int64]")
"""A number, or an array of them."""

REPLICATED_SIZES: Mapping[TensorAxis, str] = MappingProxyType(
    {
        "all": "replicated_gradients",
        "tokens": "replicated_in_columns",
        "features": "replicated_in_rows",
    }
)
"""The field of `StateSizes` with the gradients that tensor-parallel ranks replicate, by the ranks
that replicate them."""


class PassCollective(NamedTuple):
    """One collective inside a pass."""

    kind: CollectiveKind
    axis: CollectiveAxis
    """Which ranks of the layer take part."""
    sent_bytes: int
    """Bytes that one device sends."""


class CommunicationVolume:
    """The bytes that each instruction of a plan sends.

    Args:
        tensor_rank: tensor-parallel rank of the device; rank 0 has the largest shard.
    """

    def __init__(self, plan: Plan, graph: Graph, tensor_rank: int = 0) -> None:
        self._plan = plan
        self._sizes = plan_state_sizes(plan, graph, tensor_rank)
        kinds = rank_kinds(plan, graph, tensor_rank)
        self._kinds = tuple(kinds[each.name] for each in graph.layer_kinds())
        self._selective = selective_layers(plan)
        self._reach = graph.gradient_reach
        self._collectives: dict[tuple[object, ...], tuple[PassCollective, ...]] = {}
        self._tied = {
            tied.user_layer: tied for tied in tied_across_stages(plan, graph, tensor_rank)
        }

    def sent_bytes(self, instruction: Instruction) -> int:
        """Bytes that one device sends for an instruction."""
        kind, layer, _ = instruction
        if layer is None:
            return 0
        sizes, plan = self._sizes[layer], self._plan
        if kind == "send":
            return message_bytes(self._kinds[layer], plan)
        if kind == "send_tied_weights":
            return self._tied[layer].elements * plan.parameter_itemsize
        if kind == "send_tied_grads":
            return self._tied[layer].gradient_elements * plan.gradient_itemsize
        if kind in ("unshard_weights", "all_gather_params", "reduce_grads"):
            return sum(state_sent_bytes(kind, own, part) for own, part in sizes.parts(plan))
        return sum(collective.sent_bytes for collective in self.pass_collectives(instruction))

    def pass_collectives(self, instruction: Instruction) -> tuple[PassCollective, ...]:
        """The collectives inside a pass; none if it is no pass."""
        kind, layer, _ = instruction
        if layer is None or not has_collectives(self._plan):
            return ()
        key = kind, self._kinds[layer].name, layer in self._selective, self._reach(layer)
        if key not in self._collectives:
            self._collectives[key] = tuple(self._find_collectives(kind, layer))
        return self._collectives[key]

    def _find_collectives(self, kind: InstructionKind, layer: int) -> Iterator[PassCollective]:
        plan, layer_kind = self._plan, self._kinds[layer]
        selective = layer in self._selective
        cost = layer_kind.cost(plan.precision, compiled=plan.compile, selective=selective)
        ops = pass_ops(kind, layer_kind, cost, reach=self._reach(layer))
        yield from op_collectives(ops, plan)


def state_sent_bytes(kind: InstructionKind, plan: Plan, sizes: StateSizes) -> int:
    """Bytes that a device sends to gather or reduce one part of a layer's state.

    To reduce a gradient, replicated parameters are summed over tensor-parallel ranks. The whole
    gradient is then reduce-scattered over rts' replicas, and each shard all-reduced over r / rts'.

    Args:
        kind: `unshard_weights`, `all_gather_params` or `reduce_grads`.
        plan: the plan as that part sees it.
    """
    if kind == "unshard_weights":
        return all_gather_bytes(sizes.weights, plan.sharding.parameters)
    if kind == "all_gather_params":
        shards = updates_per_shard(plan)
        return all_gather_bytes(sizes.updated_weights * shards, shards)
    degree = plan.sharding.optimizer
    over_ranks = sum(sent for _, sent in replicated_gradient_sums(sizes, plan))
    scattered = all_gather_bytes(sizes.gradients, degree) if degree > 1 else 0
    copies = plan.parallel.replicas // degree
    return over_ranks + scattered + all_reduce_bytes(sizes.gradient_shard, copies)


def message_bytes(kind: LayerKind, plan: Plan) -> int:
    """Bytes of a layer's output that a device sends to the next stage."""
    cost = kind.cost(plan.precision, compiled=plan.compile)
    return round(cost.message_bytes.at(micro_of_rank(plan), plan.batch.sequence))


def op_collectives(ops: Iterable[Op], plan: Plan) -> Iterator[PassCollective]:
    """The collectives of some ops under a plan.

    Constants of other stacks were fitted with all tokens of a sequence in tensor-parallel
    collectives, however many ranks divide it.
    """
    return (pass_collective(op.collective, plan) for op in ops if op.collective is not None)


def pass_collective(collective: Collective, plan: Plan, micro: int | None = None) -> PassCollective:
    """One collective under a plan; of another micro-batch size if one is given."""
    kind, buffer, axis = collective
    has_whole = plan.stack is not None and axis != "context"
    micro = plan.batch.micro if micro is None else micro
    part = micro if has_whole else micro / (plan.parallel.context or 1)
    nbytes = round(buffer.at(part, plan.batch.sequence))
    return PassCollective(kind, axis, collective_bytes(kind, nbytes, collective_ranks(plan, axis)))


def collective_ranks(plan: Plan, axis: CollectiveAxis) -> int:
    """Number of ranks that take part in a collective of an axis."""
    if axis == "experts":
        return plan.parallel.expert_degree
    if axis == "context":
        return plan.parallel.context or 1
    return group_size(plan.parallel.tensor, axis)


def replicated_gradient_sums(sizes: StateSizes, plan: Plan) -> tuple[tuple[TensorAxis, int], ...]:
    """All-reduces over tensor-parallel ranks that complete gradients of replicated parameters.

    Returns:
        The ranks that take part and the bytes that one device sends, for each that sends any.
    """
    sums = (
        (axis, all_reduce_bytes(getattr(sizes, name), group_size(plan.parallel.tensor, axis)))
        for axis, name in REPLICATED_SIZES.items()
    )
    return tuple((axis, sent) for axis, sent in sums if sent)


def collective_bytes(kind: CollectiveKind, nbytes: _Count, ranks: _Count) -> _Count:
    """Bytes that each of n devices sends in a collective over a buffer of B bytes."""
    return (all_reduce_bytes if kind == "all_reduce" else all_gather_bytes)(nbytes, ranks)


def all_gather_bytes(nbytes: _Count, ranks: _Count) -> _Count:
    """`(n - 1) / n B`: bytes that each of n devices sends in an all-gather or a reduce-scatter."""
    return nbytes * (ranks - 1) // ranks


def all_reduce_bytes(nbytes: _Count, ranks: _Count) -> _Count:
    """`2 (n - 1) / n B`: bytes that each of n devices sends in an all-reduce."""
    return 2 * nbytes * (ranks - 1) // ranks
