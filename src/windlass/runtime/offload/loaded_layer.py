"""What of an offloaded layer is in device memory, and what of it waits outside."""

from typing import NamedTuple

from torch import Tensor

from windlass.runtime.offload.transfer_queue import TransferHandle


class LoadedLayer(NamedTuple):
    """A layer's weights that are in device memory, or on their way."""

    memory: Tensor
    """The buffer that holds them, `UInt8[n]`."""
    transfer: TransferHandle
    """The transfer or update that fills it."""


class OffloadedGrads(NamedTuple):
    """Gradients that are offloaded until their update."""

    step: int
    has_gradient: tuple[bool, ...]
    """Whether each of the layer's weights has a gradient."""
