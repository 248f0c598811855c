"""Outputs of layers that wait beyond the near tier, from their forward pass to their backward.

They go home one after the other: while one leaves the next layer computes, and the one after that
leaves once the first has gone. The places where they waited are taken again by the next ones.
"""

import shutil
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from windlass.atomic_files import storage_errors
from windlass.runtime.offload.backing_store import BounceBuffer, FileBackingStore, HostBackingStore, BackingStore
from windlass.runtime.offload.direct_io import round_up_to_page
from windlass.runtime.offload.pinned_memory import PinnedMemory
from windlass.runtime.offload.transfer_queue import TransferQueue, TransferStats, TransferHandle
from windlass.schema.plan import HOST_TIER


class _Away(NamedTuple):
    """An output that is at home, or on its way there."""

    shelf: BackingStore
    nbytes: int
    shape: torch.Size
    dtype: torch.dtype


class ActivationOffloader:
    """The home of outputs of one device.

    Args:
        lane: of all moves.
        tier: their home.
        folder: of their files, if it is not memory of the host.
        device: that computes.
    """

    def __init__(self, lane: TransferQueue, tier: str, folder: Path, device: torch.device) -> None:
        self._lane, self._folder, self._device = lane, folder, device
        self._bounce = None if tier == HOST_TIER else BounceBuffer(device)
        self._memory: list[PinnedMemory] = []
        self._files = 0
        self._free: dict[int, list[BackingStore]] = defaultdict(list)
        self._away: dict[tuple[int, int], _Away] = {}
        self._coming: dict[tuple[int, int], TransferHandle] = {}
        self._leaving: TransferHandle | None = None

    def begin(self) -> None:
        """A step begins: what was left of one that ended early is of no use."""
        for away in self._away.values():
            self._free[away.nbytes].append(away.shelf)
        self._away.clear()
        self._coming.clear()

    def keep(self, layer: int, micro: int, output: Tensor) -> None:
        """Begins to bring an output home, when the one before it has gone.

        Args:
            layer: that made it.
            micro: of which micro-batch.
            output: handed over.

        Raises:
            StorageError: the disk is full, or does not take files.
        """
        if self._leaving is not None:
            self._leaving.wait()
        content = _content(output.detach().contiguous())
        nbytes = content.numel()
        shelf = self._free[nbytes].pop() if self._free[nbytes] else self._shelf(nbytes)
        self._away[layer, micro] = _Away(shelf, nbytes, output.shape, output.dtype)

        def move(moved: TransferStats) -> None:
            with storage_errors(self._folder), shelf.opened(write=True) as access:
                access.write(content, 0)
            moved.written_bytes += nbytes

        self._leaving = self._lane.begin(move, content)

    def restore(self, layer: int, micro: int) -> Tensor:
        """Begins to bring an output near; it is there after `need`."""
        shelf, nbytes, shape, dtype = self._away.pop((layer, micro))
        output = torch.empty(shape, dtype=dtype, device=self._device)
        content = _content(output)

        def move(moved: TransferStats) -> None:
            with storage_errors(self._folder), shelf.opened() as access:
                access.read(content, 0)
            moved.read_bytes += nbytes

        self._coming[layer, micro] = self._lane.begin(move)
        # Free at once: whatever is kept there next comes later in the lane.
        self._free[nbytes].append(shelf)
        return output

    def need(self, layer: int, micro: int) -> None:
        """Returns when an output is near, if it is on its way.

        Raises:
            StorageError: it cannot be read, or could not be written.
        """
        coming = self._coming.pop((layer, micro), None)
        if coming is not None:
            coming.wait()

    def close(self) -> None:
        """Gives all room back, and removes the folder, once the lane has ended."""
        if self._bounce is not None:
            self._bounce.close()
        for memory in self._memory:
            memory.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _shelf(self, nbytes: int) -> BackingStore:
        """Room for one more output, as many as are ever away at once."""
        if self._bounce is None:
            self._memory.append(PinnedMemory(nbytes, self._device))
            in_memory = HostBackingStore(nbytes)
            in_memory.bytes = self._memory[-1].bytes
            return in_memory
        with storage_errors(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / f"output-{self._files:05d}"
            in_file = FileBackingStore(path, round_up_to_page(nbytes), (self._bounce, self._bounce))
            in_file.make()
        self._files += 1
        return in_file


def _content(tensor: Tensor) -> Tensor:
    """`UInt8[n]`: the bytes of a tensor."""
    return tensor.view(-1).view(torch.uint8)
