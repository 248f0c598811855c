"""The device mesh of a plan, and one rank's place in it."""

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from windlass.models import ContextParallelRank, ExpertParallelRank, TensorParallelRank
from windlass.runtime import OneOfRanks
from windlass.schema import Plan
from windlass.torch_ext import Device

AXES = ("pp", "dp_replicate", "dp_shard", "tp")
"""Axes of the mesh, the outermost first: ranks are numbered as `mesh_coord` numbers them."""


def device_mesh(plan: Plan, device: Device) -> DeviceMesh:
    """The mesh (pp, dp_replicate, dp_shard, tp) of a plan.

    Replicas that are neighbours share one copy of the weights; those that divide sequences are
    neighbours, too.
    """
    parallel, shard = plan.parallel, plan.sharding.parameters
    shape = (parallel.pipeline, parallel.replicas // shard, shard, int(parallel.tensor))
    return init_device_mesh(device.torch_device.type, shape, mesh_dim_names=AXES)


class MeshRank(OneOfRanks):
    """One rank of the mesh. All ranks create theirs at once, after initialization."""

    experts = ExpertParallelRank()

    def __init__(self, plan: Plan, rank: int, device: Device) -> None:
        super().__init__(plan, rank, device)
        self.mesh = device_mesh(plan, device)
        replicas = self.mesh["dp_replicate"].size()
        self.data_mesh = (
            self.mesh["dp_replicate", "dp_shard"] if replicas > 1 else self.mesh["dp_shard"]
        )
        """What FSDP shards over; in two dimensions it replicates over the first (HSDP)."""
        self.replica = self.mesh.get_local_rank("dp_replicate")
        """Index of this rank among those that hold copies of the same shard."""
        self.shard = self.mesh.get_local_rank("dp_shard")
        """Index of this rank's shard."""
        self.shards = self.mesh["dp_shard"].size()
        self.stage_group = self.mesh.get_group("pp")
        self.tensor_group = self.mesh.get_group("tp")
        self.context = self._context_rank(plan.parallel.context or 1)
        self.tensor_parallel = TensorParallelRank(
            degree=int(plan.parallel.tensor),
            index=self.coord.tensor_rank,
            group_name=self.tensor_group.group_name,
            column_group_name=self.tensor_group.group_name,
        )

    def _context_rank(self, degree: int) -> ContextParallelRank:
        if degree == 1:
            return ContextParallelRank()
        index, tensor = self.coord.data_rank % degree, int(self._plan.parallel.tensor)
        first = self.rank - index * tensor
        group = self._group([first + place * tensor for place in range(degree)])
        return ContextParallelRank(degree=degree, index=index, group_name=group.group_name)

    def rank_of_stage(self, stage: int) -> int:
        """The global rank with this one's place in another stage."""
        return dist.get_global_rank(self.stage_group, stage)

    def group_of_stages(self, stages: Sequence[int]) -> dist.ProcessGroup:
        """The ranks with this one's place in some stages; only they create it."""
        return self._group([self.rank_of_stage(stage) for stage in stages])

    def _group(self, ranks: list[int]) -> dist.ProcessGroup:
        group = dist.new_group(ranks, use_local_synchronization=True)
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"rank {self.rank} is none of {ranks}")
        return group
