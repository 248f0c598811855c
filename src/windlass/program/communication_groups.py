"""Communication groups: the ranks that each instruction of a device communicates with.

NCCL knows no tags: all that a communicator carries runs in the order in which it was issued. So
each axis of collectives has communicators of its own, and so has each channel of messages over each
stage boundary, in each direction. `communicator_partitions` lists them all, in the one order in
which all ranks make them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Literal, NamedTuple

from windlass.program.device_mesh import MeshCoord, mesh_coord, rank_of
from windlass.program.instruction import (
    COLLECTIVE_KINDS,
    MATCHING_RECEIVE,
    Instruction,
    InstructionKind,
)
from windlass.program.replicas.context_parallel import context_group
from windlass.program.replicas.expert_parallel import (
    expert_group,
    pass_group,
    same_expert_ranks,
)
from windlass.program.replicas.zero_sharding import (
    expert_sharding,
    gradient_reduce_group,
    gradient_scatter_group,
    parameter_gather_group,
    update_gather_group,
)
from windlass.program.tensor_parallel import LAYER_PASSES, passes_with_collectives
from windlass.program.tied_weights import tied_across_stages
from windlass.schema import Graph, Plan, TensorAxis, grid_columns, group_size

DataUse = Literal["gather", "update", "scatter", "reduce"]
"""What data-parallel ranks do: gather weights, gather updated parts, scatter and reduce
gradients."""

CollectiveUse = Literal[
    TensorAxis, DataUse, "context", "experts",
    "expert gather", "expert update", "expert scatter", "expert reduce",
]  # fmt: skip
"""What a communicator's collectives are for: an axis of the tensor-parallel ranks; what
data-parallel ranks do; the keys and values of those that divide sequences; the exchange of tokens
between those that divide experts; or what those do that hold the same experts."""

EXPERT_USES: Mapping[DataUse, CollectiveUse] = MappingProxyType(
    {
        "gather": "expert gather",
        "update": "expert update",
        "scatter": "expert scatter",
        "reduce": "expert reduce",
    }
)
"""What ranks that hold the same experts do, by what data-parallel ranks do with other weights."""

_TENSOR_USES: tuple[TensorAxis, ...] = ("all", "tokens", "features")
_Group = Callable[[int, Plan], tuple[int, ...]]
_SHARDING_GROUPS: Mapping[DataUse, _Group] = MappingProxyType(
    {
        "gather": parameter_gather_group,
        "update": update_gather_group,
        "scatter": gradient_scatter_group,
        "reduce": gradient_reduce_group,
    }
)
_DATA_GROUPS: Mapping[CollectiveUse, _Group] = MappingProxyType(
    {
        **{use: group for use, group in _SHARDING_GROUPS.items()},  # noqa: C416  other keys' type
        "context": context_group,
        "experts": expert_group,
        **{
            EXPERT_USES[use]: partial(same_expert_ranks, group)
            for use, group in _SHARDING_GROUPS.items()
        },
    }
)
_STATE_USES: Mapping[InstructionKind, DataUse] = MappingProxyType(
    {"unshard_weights": "gather", "all_gather_params": "update"}
)
_TIED_KINDS: tuple[InstructionKind, ...] = (
    "send_tied_weights",
    "accumulate_tied_grads",
    "recv_tied_weights",
    "send_tied_grads",
)


class Communicator(NamedTuple):
    """Ranks that communicate for one use, in an order of their own."""

    use: str
    """A `CollectiveUse`, or the channel of its messages, as in `PeerMap.channel`."""
    ranks: tuple[int, ...]
    """The global ranks; of a channel the sender, then the receiver."""

    @property
    def is_channel(self) -> bool:
        """Whether it carries messages from one rank to another."""
        return self.use not in _TENSOR_USES and self.use not in _DATA_GROUPS


Partition = tuple[Communicator, ...]
"""Communicators that are made by one split of all ranks: no rank is in two of them."""


def communicator_partitions(plan: Plan, graph: Graph) -> tuple[Partition, ...]:
    """All communicators of a plan but that of all ranks, in the order in which they are made.

    Their number grows with the plan's axes, not with its ranks: one for each axis of collectives of
    more than one rank, and at most eight for the messages of a pipeline with one tied weight.
    """
    return (
        *_tensor_partitions(plan),
        *_data_partitions(plan),
        *_message_partitions(plan, graph),
    )


def communicator_use(use: CollectiveUse, plan: Plan) -> CollectiveUse:
    """The use whose communicators carry these collectives; another one has the same ranks.

    A tensor axis of all ranks uses `all`. Where weights are not sharded, `update` has the ranks of
    `scatter`, and is never in flight beside it. `gather` and `scatter` may have the same ranks too,
    but overlap: the next layer is gathered while the last one's gradients are scattered. The same
    holds of the ranks with the same experts, whose collectives run beside those of other weights.
    """
    if use in ("tokens", "features"):
        degree = plan.parallel.tensor
        return "all" if group_size(degree, use) == int(degree) else use
    if use == "expert update":
        return "expert scatter" if expert_sharding(plan).sharding.parameters == 1 else use
    return "scatter" if use == "update" and plan.sharding.parameters == 1 else use


def _tensor_partitions(plan: Plan) -> Iterator[Partition]:
    degree, columns = int(plan.parallel.tensor), grid_columns(plan.parallel.tensor)
    parts: dict[TensorAxis, list[range]] = {
        "all": [range(degree)],
        "tokens": [range(column, degree, columns) for column in range(columns)],
        "features": [range(first, first + columns) for first in range(0, degree, columns)],
    }
    for use in _TENSOR_USES:
        if len(parts[use][0]) > 1 and communicator_use(use, plan) == use:
            yield tuple(
                Communicator(use, tuple(first + rank for rank in part))
                for first in range(0, plan.parallel.devices, degree)
                for part in parts[use]
            )


def _data_partitions(plan: Plan) -> Iterator[Partition]:
    tensor, replicas = int(plan.parallel.tensor), plan.parallel.replicas
    plain: tuple[CollectiveUse, ...] = (*_SHARDING_GROUPS, "context")
    for use in plain if plan.parallel.expert is None else _DATA_GROUPS:
        group = _DATA_GROUPS[use]
        parts = dict.fromkeys(group(replica, plan) for replica in range(replicas))
        if len(next(iter(parts))) > 1 and communicator_use(use, plan) == use:
            yield tuple(
                Communicator(use, tuple(first + replica * tensor for replica in part))
                for stage in range(0, plan.parallel.devices, replicas * tensor)
                for first in range(stage, stage + tensor)
                for part in parts
            )


def _message_partitions(plan: Plan, graph: Graph) -> Iterator[Partition]:
    """The communicators of all channels; channels that share no stage are made together."""
    width = plan.parallel.replicas * int(plan.parallel.tensor)
    partitions: list[list[tuple[str, int, int]]] = []
    for channel in _channels(plan, graph):
        for partition in partitions:
            if all(set(channel[1:]).isdisjoint(other[1:]) for other in partition):
                partition.append(channel)
                break
        else:
            partitions.append([channel])
    for partition in partitions:
        yield tuple(
            Communicator(name, (source * width + index, target * width + index))
            for name, source, target in partition
            for index in range(width)
        )


def _channels(plan: Plan, graph: Graph) -> Iterator[tuple[str, int, int]]:
    """The name of each channel, the stage that sends and the stage that receives."""
    stages = plan.parallel.pipeline
    boundaries = [(index % stages, (index + 1) % stages, index) for index in _boundaries(plan)]
    onward = dict.fromkeys((before, after) for before, after, _ in boundaries)
    back = dict.fromkeys(
        (after, before)
        for before, after, index in boundaries
        if plan.stages[index].end_layer > graph.first_trained
    )
    yield from (("onward", before, after) for before, after in onward)
    yield from (("back", after, before) for after, before in back)
    for tied in tied_across_stages(plan, graph):
        layer, owner, user = tied.user_layer, tied.owner_stage, tied.user_stage
        yield _tied_channel("recv_tied_weights", layer), owner, user
        yield _tied_channel("accumulate_tied_grads", layer), user, owner


def _boundaries(plan: Plan) -> Sequence[int]:
    """The model chunks whose output goes to another stage, by index."""
    return range(len(plan.stages) - 1) if plan.parallel.pipeline > 1 else ()


def _tied_channel(receive: InstructionKind, layer: int | None) -> str:
    return f"{receive} of layer {layer}"


def communication_group(instruction: Instruction, device: int, plan: Plan) -> tuple[int, ...]:
    """The ranks of a collective instruction, in the order of their parts of the full buffer.

    A pass has the tensor-parallel ranks of one stage and of the replicas that divide experts or
    sequences.
    `reduce_grads` has all ranks of a stage: replicated parameters are summed over tensor-parallel
    ranks, then all over replicas. `unshard_weights` has the replicas that share the weights,
    `all_gather_params` those that updated parts of one shard; where experts are divided, all of
    both kinds of weights. All other collectives have every rank of the plan.
    """
    coord = mesh_coord(device, plan.parallel)
    if instruction.kind in LAYER_PASSES:
        ranks = range(plan.parallel.tensor)
        replicas = pass_group(coord.data_rank, plan)
        return tuple(
            rank_of(MeshCoord(coord.stage, rank, replica), plan.parallel)
            for replica in replicas
            for rank in ranks
        )
    if instruction.kind == "reduce_grads":
        first = rank_of(coord._replace(tensor_rank=0, data_rank=0), plan.parallel)
        return tuple(range(first, first + plan.parallel.replicas * plan.parallel.tensor))
    use = _STATE_USES.get(instruction.kind)
    if use is None:
        return tuple(range(plan.parallel.devices))
    replicas = _SHARDING_GROUPS[use](coord.data_rank, plan)
    if plan.parallel.expert is not None:
        # Both kinds of weights are gathered among the replicas that share the optimizer state.
        replicas = gradient_scatter_group(coord.data_rank, plan)
    return tuple(rank_of(coord._replace(data_rank=replica), plan.parallel) for replica in replicas)


class PeerMap:
    """The rank at the other end of each message of a plan; which instructions are collective."""

    def __init__(self, plan: Plan, graph: Graph) -> None:
        self._parallel = plan.parallel
        self._collective_passes = passes_with_collectives(plan, graph)
        stages = plan.parallel.pipeline
        self._boundaries = {
            chunk.end_layer - 1: (index % stages, (index + 1) % stages)
            for index, chunk in enumerate(plan.stages[:-1])
        }
        self._tied_peers = {
            (tied.user_layer, stage): (
                tied.user_stage if stage == tied.owner_stage else tied.owner_stage
            )
            for tied in tied_across_stages(plan, graph)
            for stage in (tied.owner_stage, tied.user_stage)
        }

    def is_collective(self, instruction: Instruction) -> bool:
        """Whether an instruction waits for every device of its group."""
        kind, layer, _ = instruction
        return kind in COLLECTIVE_KINDS or (kind, layer) in self._collective_passes

    def peer_of(self, instruction: Instruction, device: int) -> int | None:
        """The rank at the other end of a message; None if the layer is at no stage boundary."""
        kind, layer, _ = instruction
        coord = mesh_coord(device, self._parallel)
        if layer is None:
            return None
        if kind in _TIED_KINDS:
            return self._same_rank_on(self._tied_peers.get((layer, coord.stage)), coord)
        boundary = self._boundaries.get(layer)
        if boundary is None or coord.stage not in boundary:
            return None
        before, after = boundary
        return self._same_rank_on(after if before == coord.stage else before, coord)

    def channel(self, instruction: Instruction, device: int) -> str:
        """The ordered channel of a message.

        Activations (`onward`) and their gradients (`back`) have separate channels: with two
        interleaved stages, both kinds go from each device to the other. Tied weights and their
        gradients are named after the receiving instruction.
        """
        kind, layer, _ = instruction
        if kind in ("send", "receive") and layer is not None:
            source = self._boundaries[layer][0 if kind == "send" else 1]
            return "onward" if source == mesh_coord(device, self._parallel).stage else "back"
        return _tied_channel(MATCHING_RECEIVE.get(kind, kind), layer)

    def communicator(self, instruction: Instruction, device: int) -> Communicator | None:
        """The communicator of a message; None if its layer is at no stage boundary."""
        peer = self.peer_of(instruction, device)
        if peer is None:
            return None
        sends = instruction.kind in MATCHING_RECEIVE
        ranks = (device, peer) if sends else (peer, device)
        return Communicator(self.channel(instruction, device), ranks)

    def _same_rank_on(self, stage: int | None, coord: MeshCoord) -> int | None:
        """The rank with the same tensor- and data-parallel rank on another stage."""
        return None if stage is None else rank_of(coord._replace(stage=stage), self._parallel)
