"""The store that a plan asks for: in memory, offloaded, sharded, or sharded and offloaded."""

from collections.abc import Callable

from windlass.runtime.distributed.process_groups import ProcessGroups
from windlass.runtime.distributed.shards.sharded_store import ShardedStore
from windlass.runtime.offload.offloaded_store import OffloadedStore
from windlass.runtime.offload.sharded_offloaded_store import ShardedOffloadedStore
from windlass.runtime.offload.transfer_queue import TransferQueue
from windlass.runtime.optimizers.optimizer import Optimizer
from windlass.runtime.param_store import InMemoryStore, ParamStore
from windlass.runtime.rank_context import RankContext


def store_for(
    context: RankContext,
    optimizer: Optimizer,
    *,
    queue: TransferQueue | None,
    groups: ProcessGroups | None,
    before_update: Callable[[int], None],
) -> ParamStore:
    """The store of a rank's weights and optimizer state.

    Args:
        context: the rank's plan, model and device.
        optimizer: updates the weights.
        queue: carries transfers between tiers; None if the plan has none.
        groups: the groups of this rank; None if it is the only one.
        before_update: called with a layer's index before its state changes.
    """
    offloaded = context.plan.is_offloaded("optimizer")
    if queue is not None and offloaded and groups:
        return ShardedOffloadedStore(context, optimizer, queue, groups, before_update=before_update)
    if queue is not None and offloaded:
        return OffloadedStore(context, optimizer, queue, before_update=before_update)
    if groups:
        return ShardedStore(context, optimizer, groups, before_update=before_update)
    return InMemoryStore(context, optimizer, before_update=before_update)
