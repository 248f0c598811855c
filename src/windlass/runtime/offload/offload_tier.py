"""OffloadTier: what the offloaded layers of one part of the weights share."""

import shutil
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path

from torch import Tensor

from windlass.atomic_files import storage_errors
from windlass.models import WeightPlace
from windlass.program import Program
from windlass.runtime.distributed.flat_weights import WeightPart
from windlass.runtime.offload.backing_store import BackingStores
from windlass.runtime.offload.frozen_weights import places_of_base
from windlass.runtime.offload.offloaded_gradients import OffloadedGradients
from windlass.runtime.offload.staging_buffers import StagingBuffers
from windlass.runtime.offload.transfer_queue import TransferHandle, TransferQueue, TransferStats
from windlass.runtime.optimizers.optimizer import Optimizer
from windlass.runtime.rank_context import RankContext


class OffloadTier:
    """What the offloaded layers of one part of the weights share.

    Args:
        context: what this rank runs; its program says which gradients are offloaded.
    """

    def __init__(
        self, context: RankContext, part: WeightPart, optimizer: Optimizer, queue: TransferQueue,
        staging: StagingBuffers, before_update: Callable[[int], None],
    ) -> None:  # fmt: skip
        self.context, self.part, self.plan = context, part, part.plan
        self.optimizer, self.queue, self.staging = optimizer, queue, staging
        self.before_update = before_update
        self.folder: Path = context.state_folder / "experts" if part.experts else (
            context.state_folder
        )  # fmt: skip
        self.stores = BackingStores(self.folder, context.device)
        self.gradients = OffloadedGradients()
        self.grad_layers = _grad_layers(context.program)
        self.program_shards = context.plan.sharding.parameters > 1
        """Whether the program unshards and frees layers, be these weights sharded or not."""
        self.step = 0

    @cached_property
    def places(self) -> Mapping[str, WeightPlace]:
        """Where frozen weights stand in files of the base, by full name."""
        return places_of_base(self.context.stack, self.plan)

    def allocate(self) -> None:
        """Allocates the host memory of all layers.

        Raises:
            StorageError: there is not enough.
        """
        with storage_errors(self.folder):
            self.stores.allocate_host_memory()

    def submit(self, transfer: Callable[[TransferStats], None], *uses: Tensor) -> TransferHandle:
        """Queues a transfer, which holds these tensors until it has ended."""
        return self.queue.submit(storage_errors(self.folder)(transfer), *uses)

    def close(self) -> None:
        """Frees the host memory and removes the state's files; the queue must have ended.

        What must persist is in checkpoints.
        """
        self.stores.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _grad_layers(program: Program) -> frozenset[int]:
    """The layers whose gradients are offloaded until their update."""
    instructions = program.instructions
    offloaded = (layer for kind, layer, _ in instructions if kind == "offload_grads")
    return frozenset(layer for layer in offloaded if layer is not None)
