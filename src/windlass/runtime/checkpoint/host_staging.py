"""The way of an accelerator's tensors into a file: block by block through pinned host memory.

Copies run in the stream that is current, which is the saver's own, so that the stream that trains
does not wait for them. Two blocks are all the memory that a save takes: while one is written, the
other is filled. No GPU has run this yet.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from windlass.torch_ext import Device, Event, PinnedMemory

BLOCK_BYTES = 32 * 2**20
"""Bytes of one block: long enough for the link's full rate, and for several system calls."""


class HostStaging:
    """Two blocks of pinned host memory, allocated when first needed and freed by `close`."""

    def __init__(self, device: Device, block_bytes: int = BLOCK_BYTES) -> None:
        self._device, self._block_bytes = device, block_bytes
        self._memory: PinnedMemory | None = None

    def blocks(self, tensor: Tensor) -> Iterator[memoryview]:
        """The bytes of a tensor in order; each block is valid until the next one is asked for.

        Nobody may change the tensor meanwhile.
        """
        if self._memory is None:
            self._memory = PinnedMemory(2 * self._block_bytes, self._device)
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        halves = self._memory.buffer[: 2 * self._block_bytes].split(self._block_bytes)
        filled: tuple[Tensor, Event] | None = None
        try:
            for index, part in enumerate(flat.split(self._block_bytes)):
                previous, filled = filled, self._fill(halves[index % 2], part)
                if previous is not None:
                    yield _content(*previous)
            if filled is not None:
                yield _content(*filled)
        finally:
            # A writer that fails asks for no more blocks, and then the memory is freed.
            if filled is not None:
                filled[1].synchronize()

    def _fill(self, half: Tensor, part: Tensor) -> tuple[Tensor, Event]:
        """Starts to copy a part of a tensor; returns where to, and the event that follows."""
        block = half[: part.numel()]
        block.copy_(part, non_blocking=True)
        copied = self._device.new_event()
        copied.record(self._device.current_stream())
        return block, copied

    def close(self) -> None:
        """Frees the memory; no copy may be running."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None


def _content(block: Tensor, copied: Event) -> memoryview:
    """A block's bytes, once they are there."""
    copied.synchronize()
    return block.numpy().data


def host_staging(device: Device) -> HostStaging | None:
    """What saves of a device's tensors pass through; None where files are written from memory."""
    return HostStaging(device) if device.is_asynchronous else None
