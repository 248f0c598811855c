"""The process groups of one rank: its collectives, its messages, and what all ranks agree on.

Built on torch.distributed: gloo between CPUs, nccl between GPUs. Only gloo has been tested; no run
has used the nccl path yet. The program decides which ranks take part in an instruction and who is
at the other end of a message; this module carries it out.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from windlass.models import TensorParallelRank, all_gather, reduce_scatter
from windlass.program import (
    Instruction,
    InstructionKind,
    MeshCoord,
    PeerMap,
    all_gather_bytes,
    all_reduce_bytes,
    gradient_reduce_group,
    gradient_scatter_group,
    mesh_coord,
    parameter_gather_group,
    rank_of,
    update_gather_group,
)
from windlass.runtime.distributed.rendezvous import COLLECTIVE_TIMEOUT
from windlass.schema import Graph, Plan, TensorAxis, grid_columns, group_size
from windlass.torch_ext import Device, Event

TENSOR_AXES: tuple[TensorAxis, ...] = ("all", "tokens", "features")
"""The axes of a tensor-parallel grid that have a process group each."""

_CHANNELS = ("onward", "back", "recv_tied_weights", "accumulate_tied_grads")
"""Kinds of messages, each delivered in its own order; the index is the message's tag."""


class DistContext(Protocol):
    """This rank's position among all ranks, and the reductions over all of them."""

    rank: int
    coord: MeshCoord
    world_size: int

    def all_reduce_sum(self, values: Sequence[float]) -> list[float]:
        """The sum of each value over all ranks, in float64."""

    def all_reduce_max(self, value: float) -> float:
        """The largest value over all ranks."""


class SingleProcess:
    """The only rank of a run on one device."""

    rank = 0
    coord = MeshCoord(0, 0, 0)
    world_size = 1

    def all_reduce_sum(self, values: Sequence[float]) -> list[float]:
        """The values themselves."""
        return list(values)

    def all_reduce_max(self, value: float) -> float:
        """The value itself."""
        return value


class ProcessGroups:
    """One rank of several, and its groups. All ranks create theirs at once, after initialization.

    Args:
        plan: a plan for more than one device.
        graph: the graph that the plan divides.
        rank: rank of this process.
        device: the device that holds its tensors.
    """

    def __init__(self, plan: Plan, graph: Graph, rank: int, device: Device) -> None:
        self.rank, self.world_size = rank, plan.parallel.devices
        self.coord = mesh_coord(rank, plan.parallel)
        self.graph = graph
        """The graph that the plan divides."""
        self._plan, self._device = plan, device
        self._peers = PeerMap(plan, graph)
        self._groups = _GroupCache(plan)
        self._tensor_groups = {
            axis: self._groups.get(_tensor_parallel_ranks(self.coord, plan, axis))
            for axis in TENSOR_AXES
        }
        names = {
            axis: group.group_name if group else "" for axis, group in self._tensor_groups.items()
        }
        self.tensor_parallel = TensorParallelRank(
            degree=int(plan.parallel.tensor),
            index=self.coord.tensor_rank,
            columns=grid_columns(plan.parallel.tensor),
            group_name=names["all"],
            column_group_name=names["tokens"],
            row_group_name=names["features"],
        )
        """This rank's part of the tensor parallelism."""
        self._channel_groups = self._groups.channels(device)
        self._reduce_stream = device.new_stream()
        self._scattering: PendingCollective | None = None
        """The reduce-scatter that was started last; it holds its full gradient until its end."""
        self._pending_sends: list[tuple[Tensor, dist.Work]] = []
        self.sent_bytes: Counter[InstructionKind] = Counter()
        """Bytes that this rank has sent, by instruction kind."""

    # Collectives.

    def unshard_weights(self, full: Tensor, shard: Tensor) -> "PendingCollective":
        """Starts to all-gather the shards of a layer's weights, `[n / rts]`, into `full`, `[n]`."""
        ranks = self._ranks(parameter_gather_group)
        work = all_gather(full, shard, group=self._groups.get(ranks), waits=False)
        self.sent_bytes["unshard_weights"] += all_gather_bytes(full.nbytes, len(ranks))
        return PendingCollective(full, work, kept=shard)

    def all_reduce_tensor_parallel(self, tensor: Tensor, axis: TensorAxis) -> None:
        """Sums a tensor in place over the tensor-parallel ranks of one axis."""
        dist.all_reduce(tensor, group=self._tensor_groups[axis])
        self.sent_bytes["reduce_grads"] += all_reduce_bytes(
            tensor.nbytes, group_size(self._plan.parallel.tensor, axis)
        )

    def all_gather_params(self, shard: Tensor, updated: Tensor) -> None:
        """All-gathers the updated parts of one weight shard, `[n / q]`, into `shard`, `[n]`."""
        ranks = self._ranks(update_gather_group)
        all_gather(shard, updated, group=self._groups.get(ranks))
        self.sent_bytes["all_gather_params"] += all_gather_bytes(shard.nbytes, len(ranks))

    def all_gather_initial_params(self, shard: Tensor, part: Tensor) -> None:
        """As `all_gather_params`, before the first step; not counted in `sent_bytes`."""
        all_gather(shard, part, group=self._groups.get(self._ranks(update_gather_group)))

    def reduce_grads(self, flat: Tensor) -> "PendingCollective":
        """Starts to sum a flat gradient over data-parallel ranks, of which this rank keeps a shard.

        On an accelerator it runs in a stream of its own, behind the passes that follow; on a CPU
        the reduce-scatter computes on the host, and only the all-reduce overlaps. A reduce-scatter
        first waits for the one before, so that only one layer's full gradient is held.

        Args:
            flat: the gradient of one layer, `[n]`; may be overwritten.

        Returns:
            The reduction of this rank's shard, `[n / rts']`.
        """
        shard, kept = flat, None
        scatter_ranks = self._ranks(gradient_scatter_group)
        if len(scatter_ranks) > 1:
            if self._scattering is not None:
                self._scattering.wait()
            length = len(flat) // len(scatter_ranks)
            shard = torch.empty(length, dtype=flat.dtype, device=flat.device)
            kept = flat if self._device.is_asynchronous else None
        self._reduce_stream.wait_stream(self._device.current_stream())
        with self._device.use_stream(self._reduce_stream):
            work = self._reduce(flat, shard, scatter_ranks)
            done = self._device.new_event()
            done.record(self._reduce_stream)
        pending = PendingCollective(shard, work, kept=kept, done=done, device=self._device)
        self._scattering = pending if kept is not None else None
        return pending

    def _reduce(
        self, flat: Tensor, shard: Tensor, scatter_ranks: tuple[int, ...]
    ) -> dist.Work | None:
        """Reduces in the current stream; on a CPU the all-reduce is to be waited for."""
        if len(scatter_ranks) > 1:
            reduce_scatter(shard, flat, group=self._groups.get(scatter_ranks))
            self.sent_bytes["reduce_grads"] += all_gather_bytes(flat.nbytes, len(scatter_ranks))
        ranks = self._ranks(gradient_reduce_group)
        if len(ranks) == 1:
            return None
        self.sent_bytes["reduce_grads"] += all_reduce_bytes(shard.nbytes, len(ranks))
        beside = not self._device.is_asynchronous
        return dist.all_reduce(shard, group=self._groups.get(ranks), async_op=beside)

    # Messages.

    def send(self, instruction: Instruction, tensor: Tensor) -> None:
        """Starts to send a tensor to the rank at the other end."""
        self._drop_completed_sends()
        tensor = tensor.detach().contiguous()
        peer, channel = self._peer_and_channel(instruction)
        group, tag = self._channel_groups[channel], _CHANNELS.index(channel)
        work = dist.isend(tensor, peer, group=group, tag=tag)
        if work is not None:
            self._pending_sends.append((tensor, work))
        self.sent_bytes[instruction.kind] += tensor.nbytes

    def receive(self, instruction: Instruction, into: Tensor) -> Tensor:
        """Waits for a tensor from the rank at the other end."""
        peer, channel = self._peer_and_channel(instruction)
        group, tag = self._channel_groups[channel], _CHANNELS.index(channel)
        work = dist.irecv(into, peer, group=group, tag=tag)
        if work is not None:
            work.wait()
        return into

    def _peer_and_channel(self, instruction: Instruction) -> tuple[int, str]:
        peer = self._peers.peer_of(instruction, self.rank)
        if peer is None:
            raise ValueError(f"{instruction} has no peer: no stage boundary of rank {self.rank}")
        return peer, self._peers.channel(instruction, self.rank)

    def _drop_completed_sends(self) -> None:
        self._pending_sends = [send for send in self._pending_sends if not send[1].is_completed()]

    def wait_for_sends(self) -> None:
        """Returns when every tensor sent has arrived."""
        for _, work in self._pending_sends:
            work.wait()
        self._pending_sends.clear()

    # Reductions over all ranks.

    def all_reduce_sum(self, values: Sequence[float]) -> list[float]:
        """The sum of each value over all ranks, in float64."""
        return self._all_reduce(values, dist.ReduceOp.SUM)

    def all_reduce_max(self, value: float) -> float:
        """The largest value over all ranks."""
        return self._all_reduce((value,), dist.ReduceOp.MAX)[0]

    def sum_over_stage(self, tensor: Tensor) -> None:
        """Sums a tensor in place over all ranks that compute the same layers."""
        self.sum_over_tensor_parallel(tensor)
        for data_ranks in (gradient_scatter_group, gradient_reduce_group):
            ranks = self._ranks(data_ranks)
            if len(ranks) > 1:
                dist.all_reduce(tensor, group=self._groups.get(ranks))

    def sum_over_tensor_parallel(self, tensor: Tensor) -> None:
        """Sums a tensor in place over the tensor-parallel ranks; not counted in `sent_bytes`."""
        if self.tensor_parallel.degree > 1:
            dist.all_reduce(tensor, group=self._tensor_groups["all"])

    def _all_reduce(self, values: Sequence[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        tensor = self._device.to_device(torch.tensor(values, dtype=torch.float64))
        dist.all_reduce(tensor, op)
        result: list[float] = tensor.cpu().tolist()
        return result

    def _ranks(self, data_ranks: "_DataRanks") -> tuple[int, ...]:
        return _data_parallel_ranks(self.coord, self._plan, data_ranks)


_DataRanks = Callable[[int, Plan], tuple[int, ...]]
"""The data-parallel ranks that share something with one of them, as `parameter_gather_group`."""


class PendingCollective:
    """A tensor that a collective may still be writing.

    Args:
        tensor: what it writes.
        work: torch's handle of it; None if only `done` is to be waited for.
        kept: what it reads, whose memory must not be reused before it has ended.
        done: recorded behind it, in the stream that it runs in.
        device: the device of that stream.
    """

    def __init__(
        self,
        tensor: Tensor,
        work: dist.Work | None,
        *,
        kept: Tensor | None = None,
        done: Event | None = None,
        device: Device | None = None,
    ) -> None:
        self._tensor, self._work, self._kept = tensor, work, kept
        self._done, self._device = done, device

    def wait(self) -> Tensor:
        """The tensor; the caller's stream waits until it is written."""
        if self._work is not None:
            self._work.wait()
        if self._done is not None and self._device is not None:
            self._done.wait(self._device.current_stream())
        self._work = self._done = self._kept = None
        return self._tensor


class _GroupCache:
    """torch's process groups, by their ranks.

    All ranks create all groups, in one order. If only a group's members created it, torch 2.13
    would deadlock as soon as groups overlap.
    """

    def __init__(self, plan: Plan) -> None:
        coords = [mesh_coord(rank, plan.parallel) for rank in range(plan.parallel.devices)]
        data_groups = (
            parameter_gather_group,
            update_gather_group,
            gradient_scatter_group,
            gradient_reduce_group,
        )
        members = {
            _data_parallel_ranks(coord, plan, group) for coord in coords for group in data_groups
        }
        members |= {
            _tensor_parallel_ranks(coord, plan, axis) for coord in coords for axis in TENSOR_AXES
        }
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        for ranks in sorted(ranks for ranks in members if len(ranks) > 1):
            self._groups[ranks] = dist.new_group(list(ranks), timeout=COLLECTIVE_TIMEOUT)

    def get(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The group of these ranks; None for a single rank."""
        return self._groups.get(ranks)

    def channels(self, device: Device) -> dict[str, dist.ProcessGroup | None]:
        """The group that carries each kind of message.

        gloo matches messages by their tags. nccl has no tags and keeps one order for both
        directions of a group, so each kind gets a group of its own there. Only gloo is tested.
        """
        if device.communication_backend == "gloo":
            return dict.fromkeys(_CHANNELS)
        return {channel: dist.new_group(timeout=COLLECTIVE_TIMEOUT) for channel in _CHANNELS}


def _data_parallel_ranks(coord: MeshCoord, plan: Plan, data_ranks: _DataRanks) -> tuple[int, ...]:
    """The global ranks of the data-parallel ranks that share something with a coordinate."""
    return tuple(
        rank_of(coord._replace(data_rank=data_rank), plan.parallel)
        for data_rank in data_ranks(coord.data_rank, plan)
    )


def _tensor_parallel_ranks(coord: MeshCoord, plan: Plan, axis: TensorAxis) -> tuple[int, ...]:
    """The ranks of one tensor-parallel axis: all of a layer's, or one column or row of its grid."""
    degree, columns = int(plan.parallel.tensor), grid_columns(plan.parallel.tensor)
    row, column = divmod(coord.tensor_rank, columns)
    ranges = {
        "all": range(degree),
        "tokens": range(column, degree, columns),
        "features": range(row * columns, (row + 1) * columns),
    }
    return tuple(
        rank_of(coord._replace(tensor_rank=index), plan.parallel) for index in ranges[axis]
    )
