"""OffloadTier: what the offloaded layers of one part of the weights share."""

import shutil
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from windlass.atomic_files import storage_errors
from windlass.models import WeightPlace
from windlass.program import Program
from windlass.runtime.distributed.flat_weights import WeightPart
from windlass.runtime.offload.backing_store import BackingStores
from windlass.runtime.offload.frozen_weights import places_of_base
from windlass.runtime.offload.staging_buffers import StagingBuffers
from windlass.runtime.offload.transfer_queue import TransferHandle, TransferQueue, TransferStats
from windlass.runtime.optimizers.optimizer import Optimizer
from windlass.runtime.rank_context import RankContext


class WaitingGradients(NamedTuple):
    """The gradients of one layer that are offloaded until its update."""

    step: int
    has_gradient: tuple[bool, ...]
    """Whether each of the layer's weights has a gradient."""


class OffloadedGradients:
    """The gradients of all layers that wait, and the transfer that still reads some on the device.

    Only one layer's gradients are in transfer at a time, so that those of two are never in device
    memory.
    """

    def __init__(self) -> None:
        self.norms: dict[int, list[Tensor]] = {}
        """Norms of the gradients offloaded in this step, by layer."""
        self.clip_divisor: Tensor | None = None
        """What the gradients that wait are divided by."""
        self._waiting: dict[int, WaitingGradients] = {}
        self._transfer: TransferHandle | None = None

    def wait(self) -> None:
        """Returns when no transfer reads gradients in device memory any more."""
        if self._transfer is not None:
            self._transfer.wait()

    def read_by(self, transfer: TransferHandle) -> None:
        """Notes the transfer that reads gradients in device memory."""
        self._transfer = transfer

    def put(self, layer: int, gradients: WaitingGradients, transfer: TransferHandle) -> None:
        """Lets a layer's gradients wait once a transfer has ended."""
        self._waiting[layer] = gradients
        self.read_by(transfer)

    def take(self, layer: int) -> WaitingGradients | None:
        """The gradients of a layer, which wait no longer; None if none do."""
        return self._waiting.pop(layer, None)

    def drop(self) -> None:
        """Lets the updates of all layers change nothing."""
        for layer, (step, present) in self._waiting.items():
            self._waiting[layer] = WaitingGradients(step, (False,) * len(present))

    def finish_backward(self, clip_divisor: Tensor | None) -> None:
        """Keeps the divisor for the gradients of this step, all of which are there."""
        self.wait()
        self._transfer = None
        self.clip_divisor = clip_divisor
        self.norms.clear()


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
