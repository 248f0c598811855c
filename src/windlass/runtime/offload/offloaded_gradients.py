"""Gradients that wait in their tier for the update of their layer."""

from typing import NamedTuple

from torch import Tensor

from windlass.runtime.offload.transfer_queue import TransferHandle


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
