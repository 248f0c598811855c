"""The process groups that a rank makes, beside the communicators that the plan lists.

Torch's `fake` backend stands for ranks that answer at once, so that one process can be any of them.
"""

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from factories import sharded_graph, tiny_graph, tiny_machine, tiny_plan
from windlass.program.communication_groups import communicator_partitions, communicator_use
from windlass.runtime.distributed.communicators import Communicators
from windlass.torch_ext import device_for

GRAPH = sharded_graph(tiny_graph(layers=2, tied=True), (2,))
PLAN = tiny_plan(
    GRAPH, tiny_machine(devices=16), pipeline=2, tensor=2, data=4, sharding=(1, 2), accumulation=2
)
USES = ("all", "tokens", "features", "gather", "update", "scatter", "reduce")


@pytest.mark.parametrize("rank", [0, 7, 15])
def test_a_rank_gets_a_process_group_for_each_of_its_communicators_and_no_other(rank: int):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=16)
    try:
        groups = Communicators(PLAN, GRAPH, rank, device_for("cpu"))
        listed = [
            item for part in communicator_partitions(PLAN, GRAPH) for item in part
            if rank in item.ranks
        ]  # fmt: skip
        for item in listed:
            group = groups.of_message(item)
            assert dist.get_process_group_ranks(group) == sorted(item.ranks)
        by_use = {item.use: item for item in listed if not item.is_channel}
        for use in USES:
            item = by_use.get(communicator_use(use, PLAN))
            assert groups.size(use) == (len(item.ranks) if item else 1)
            assert groups.of_collective(use) is (groups.of_message(item) if item else None)
        assert len(dist.distributed_c10d._world.pg_map) == 1 + len(listed)
    finally:
        dist.destroy_process_group()
