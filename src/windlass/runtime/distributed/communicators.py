"""The communicators of one rank, made before the first step: torch's process groups.

All ranks make all communicators in one order, a partition at a time. NCCL splits the communicator
of all ranks, which takes one call for a partition of any number of groups; gloo makes one group
after the other, and only their members wait. Each communicator is then used once, in the direction
that a step uses: NCCL connects two ranks when they first communicate, which holds up the hosts of
both, and so may not happen in the middle of a step.
"""

import torch
import torch.distributed as dist

from windlass.program import (
    CollectiveUse,
    Communicator,
    Partition,
    communicator_partitions,
    communicator_use,
)
from windlass.runtime.distributed.rendezvous import COLLECTIVE_TIMEOUT
from windlass.schema import Graph, Plan
from windlass.torch_ext import Device


class Communicators:
    """The process group of each communicator of one rank.

    All ranks create theirs at once, after initialization.
    """

    def __init__(self, plan: Plan, graph: Graph, rank: int, device: Device) -> None:
        self._plan, self._rank, self._device = plan, rank, device
        self._groups: dict[Communicator, dist.ProcessGroup] = {}
        self._collectives: dict[str, Communicator] = {}
        """This rank's communicator of each use but messages."""
        self._use_once(None, None)
        for partition in communicator_partitions(plan, graph):
            own = next((item for item in partition if rank in item.ranks), None)
            group = self._make(partition, own)
            if own is not None and group is not None:
                self._groups[own] = group
                self._use_once(own, group)
                if not own.is_channel:
                    self._collectives[own.use] = own
        device.synchronize()

    def of_message(self, communicator: Communicator) -> dist.ProcessGroup:
        """The process group of a channel over a boundary of this rank's stage.

        Raises:
            KeyError: this rank is at no end of it.
        """
        return self._groups[communicator]

    def of_collective(self, use: CollectiveUse) -> dist.ProcessGroup | None:
        """The process group of a use; None if its only rank is this one."""
        own = self._collectives.get(communicator_use(use, self._plan))
        return None if own is None else self._groups[own]

    def size(self, use: CollectiveUse) -> int:
        """Number of ranks of a use."""
        own = self._collectives.get(communicator_use(use, self._plan))
        return 1 if own is None else len(own.ranks)

    def _make(self, partition: Partition, own: Communicator | None) -> dist.ProcessGroup | None:
        """Makes the communicators of a partition; returns this rank's."""
        description = own.use if own is not None else None
        ranks = [sorted(communicator.ranks) for communicator in partition]
        if self._can_split():
            return dist.split_group(
                split_ranks=ranks, timeout=COLLECTIVE_TIMEOUT, group_desc=description
            )
        group: dist.ProcessGroup | None = None
        for members in ranks:
            new = dist.new_group(members, timeout=COLLECTIVE_TIMEOUT, group_desc=description)
            group = new if self._rank in members else group
        return group

    def _can_split(self) -> bool:
        """Whether the communicator of all ranks was made at the start, and can be split."""
        world = dist.group.WORLD
        if world is None or world.bound_device_id is None:
            return False
        # Torch asks this of a backend too, but has no public name for the backend of a group.
        backend = world._get_backend(self._device.torch_device)  # noqa: SLF001
        return bool(backend.supports_splitting)

    def _use_once(self, own: Communicator | None, group: dist.ProcessGroup | None) -> None:
        """Sums or sends one element; without a communicator, over all ranks."""
        element = torch.zeros(1, device=self._device.torch_device)
        if own is None or not own.is_channel:
            dist.all_reduce(element, group=group)
            return
        sender, receiver = own.ranks
        if self._rank == sender:
            work = dist.isend(element, receiver, group=group)
        else:
            work = dist.irecv(element, sender, group=group)
        if work is not None:
            work.wait()
