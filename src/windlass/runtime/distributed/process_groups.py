"""The process groups of one rank: its collectives, its messages, and what all ranks agree on.

Built on torch.distributed: gloo between CPUs, nccl between GPUs. Only gloo has been tested; no run
has used the nccl path yet. The program decides which ranks take part in an instruction and who is
at the other end of a message; this module carries it out, with the same communicators on both.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from windlass.models import (
    ContextParallelRank,
    ExpertParallelRank,
    TensorParallelRank,
    all_gather,
    reduce_scatter,
)
from windlass.program import (
    CollectiveUse,
    Communicator,
    DataUse,
    Instruction,
    MeshCoord,
    PeerMap,
    mesh_coord,
)
from windlass.runtime.distributed.communicators import Communicators
from windlass.runtime.distributed.flat_weights import WeightPart
from windlass.schema import Graph, Plan, TensorAxis, grid_columns
from windlass.torch_ext import Device, Event

TENSOR_AXES: tuple[TensorAxis, ...] = ("all", "tokens", "features")
"""The axes of a tensor-parallel grid that have a process group each."""

_GRADIENT_USES: tuple[CollectiveUse, ...] = ("scatter", "reduce")
"""The uses that together sum over all data-parallel ranks."""


class DistContext(Protocol):
    """This rank's position among all ranks, and the reductions over all of them."""

    rank: int
    coord: MeshCoord
    tensor_parallel: TensorParallelRank
    """This rank's part of the tensor parallelism."""
    experts: ExpertParallelRank
    """This rank's part of the expert parallelism."""
    context: ContextParallelRank
    """This rank's part of the context parallelism."""
    world_size: int

    def all_reduce_sum(self, values: Sequence[float]) -> list[float]:
        """The sum of each value over all ranks, in float64."""

    def all_reduce_max(self, value: float) -> float:
        """The largest value over all ranks."""


class SingleProcess:
    """The only rank of a run on one device."""

    rank = 0
    coord = MeshCoord(0, 0, 0)
    tensor_parallel = TensorParallelRank(degree=1)
    experts = ExpertParallelRank()
    context = ContextParallelRank()
    world_size = 1

    def all_reduce_sum(self, values: Sequence[float]) -> list[float]:
        """The values themselves."""
        return list(values)

    def all_reduce_max(self, value: float) -> float:
        """The value itself."""
        return value


class OneOfRanks:
    """One rank of several, and what all of them sum."""

    def __init__(self, plan: Plan, rank: int, device: Device) -> None:
        self.rank, self.world_size = rank, plan.parallel.devices
        self.coord = mesh_coord(rank, plan.parallel)
        self._plan, self._device = plan, device

    def all_reduce_sum(self, values: Sequence[float]) -> list[float]:
        """The sum of each value over all ranks, in float64."""
        return self._all_reduce(values, dist.ReduceOp.SUM)

    def all_reduce_max(self, value: float) -> float:
        """The largest value over all ranks."""
        return self._all_reduce((value,), dist.ReduceOp.MAX)[0]

    def _all_reduce(self, values: Sequence[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        tensor = self._device.to_device(torch.tensor(values, dtype=torch.float64))
        dist.all_reduce(tensor, op)
        result: list[float] = tensor.cpu().tolist()
        return result


class ProcessGroups(OneOfRanks):
    """One rank of several, and its groups. All ranks create theirs at once."""

    def __init__(self, plan: Plan, graph: Graph, rank: int, device: Device) -> None:
        super().__init__(plan, rank, device)
        self.graph = graph
        """The graph that the plan divides."""
        self._peers = PeerMap(plan, graph)
        self._groups = Communicators(plan, graph, rank, device)
        tensor_groups = {axis: self._groups.of_collective(axis) for axis in TENSOR_AXES}
        names = {axis: group.group_name if group else "" for axis, group in tensor_groups.items()}
        self.tensor_parallel = TensorParallelRank(
            degree=int(plan.parallel.tensor),
            index=self.coord.tensor_rank,
            columns=grid_columns(plan.parallel.tensor),
            group_name=names["all"],
            column_group_name=names["tokens"],
            row_group_name=names["features"],
        )
        exchange = self._groups.of_collective("experts")
        self.experts = ExpertParallelRank(
            degree=plan.parallel.expert_degree,
            index=self.coord.data_rank % plan.parallel.expert_degree,
            group_name=exchange.group_name if exchange else "",
        )
        gathering = self._groups.of_collective("context")
        self.context = ContextParallelRank(
            degree=plan.parallel.context or 1,
            index=self.coord.data_rank % (plan.parallel.context or 1),
            group_name=gathering.group_name if gathering else "",
        )
        self._reduce_stream = device.new_stream()
        self._scattering: PendingCollective | None = None
        """The reduce-scatter that was started last; it holds its full gradient until its end."""
        self._pending_sends: list[tuple[Tensor, dist.Work]] = []

    # Collectives.

    def unshard_weights(self, full: Tensor, shard: Tensor, part: WeightPart) -> "PendingCollective":
        """Starts to all-gather the shards of a layer's weights, `[n / rts]`, into `full`, `[n]`."""
        group = self._groups.of_collective(part.uses["gather"])
        work = all_gather(full, shard, group=group, waits=False)
        return PendingCollective(full, work, kept=shard)

    def all_reduce_tensor_parallel(self, tensor: Tensor, axis: TensorAxis) -> None:
        """Sums a tensor in place over the tensor-parallel ranks of one axis."""
        dist.all_reduce(tensor, group=self._groups.of_collective(axis))

    def all_gather_params(self, shard: Tensor, updated: Tensor, part: WeightPart) -> None:
        """All-gathers the updated parts of one weight shard, `[n / q]`, into `shard`, `[n]`."""
        all_gather(shard, updated, group=self._groups.of_collective(part.uses["update"]))

    def reduce_grads(self, flat: Tensor, part: WeightPart) -> "PendingCollective":
        """Starts to sum a flat gradient over data-parallel ranks, of which this rank keeps a shard.

        On an accelerator it runs in a stream of its own, behind the passes that follow; on a CPU
        the reduce-scatter computes on the host, and only the all-reduce overlaps. A reduce-scatter
        first waits for the one before, so that only one layer's full gradient is held.

        Args:
            flat: the gradient of one layer, or of a part of it, `[n]`; may be overwritten.

        Returns:
            The reduction of this rank's shard, `[n / rts']`.
        """
        shard, kept = flat, None
        size = self._groups.size(part.uses["scatter"])
        if size > 1:
            if self._scattering is not None:
                self._scattering.wait()
            shard = torch.empty(len(flat) // size, dtype=flat.dtype, device=flat.device)
            kept = flat if self._device.is_asynchronous else None
        self._reduce_stream.wait_stream(self._device.current_stream())
        with self._device.use_stream(self._reduce_stream):
            work = self._reduce(flat, shard, part.uses)
            done = self._device.new_event()
            done.record(self._reduce_stream)
        pending = PendingCollective(shard, work, kept=kept, done=done, device=self._device)
        self._scattering = pending if kept is not None else None
        return pending

    def _reduce(
        self, flat: Tensor, shard: Tensor, uses: Mapping[DataUse, CollectiveUse]
    ) -> dist.Work | None:
        """Reduces in the current stream; on a CPU the all-reduce is to be waited for."""
        parts, copies = self._groups.size(uses["scatter"]), self._groups.size(uses["reduce"])
        if parts > 1:
            reduce_scatter(shard, flat, group=self._groups.of_collective(uses["scatter"]))
        if copies == 1:
            return None
        beside = not self._device.is_asynchronous
        group = self._groups.of_collective(uses["reduce"])
        return dist.all_reduce(shard, group=group, async_op=beside)

    # Messages.

    def send(self, instruction: Instruction, tensor: Tensor) -> None:
        """Starts to send a tensor to the rank at the other end."""
        self._drop_completed_sends()
        tensor = tensor.detach().contiguous()
        communicator = self._communicator(instruction)
        group = self._groups.of_message(communicator)
        work = dist.isend(tensor, communicator.ranks[1], group=group)
        if work is not None:
            self._pending_sends.append((tensor, work))

    def receive(self, instruction: Instruction, into: Tensor) -> Tensor:
        """Waits for a tensor from the rank at the other end."""
        communicator = self._communicator(instruction)
        group = self._groups.of_message(communicator)
        work = dist.irecv(into, communicator.ranks[0], group=group)
        if work is not None:
            work.wait()
        return into

    def _communicator(self, instruction: Instruction) -> Communicator:
        communicator = self._peers.communicator(instruction, self.rank)
        if communicator is None:
            raise ValueError(f"{instruction} has no peer: no stage boundary of rank {self.rank}")
        return communicator

    def _drop_completed_sends(self) -> None:
        self._pending_sends = [send for send in self._pending_sends if not send[1].is_completed()]

    def wait_for_sends(self) -> None:
        """Returns when every tensor sent has arrived."""
        for _, work in self._pending_sends:
            work.wait()
        self._pending_sends.clear()

    # Reductions.

    def sum_over_stage(self, tensor: Tensor) -> None:
        """Sums a tensor in place over all ranks that compute the same layers."""
        self.sum_over_tensor_parallel(tensor)
        for group in map(self._groups.of_collective, _GRADIENT_USES):
            if group is not None:
                dist.all_reduce(tensor, group=group)

    def sum_over_tensor_parallel(self, tensor: Tensor) -> None:
        """Sums a tensor in place over the tensor-parallel ranks."""
        if self.tensor_parallel.degree > 1:
            dist.all_reduce(tensor, group=self._groups.of_collective("all"))

    def sum_over_shards(self, tensor: Tensor) -> None:
        """Sums a tensor in place over the ranks that hold parts of the same weights.

        They are those of the tensor parallelism, and those that share the optimizer state.
        """
        self.sum_over_tensor_parallel(tensor)
        if self._groups.size("scatter") > 1:
            dist.all_reduce(tensor, group=self._groups.of_collective("scatter"))


class PendingCollective:
    """A tensor that a collective may still be writing.

    Args:
        work: torch's handle of it; None if only `done` is to be waited for.
        kept: what it reads, whose memory must not be reused before it has ended.
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
