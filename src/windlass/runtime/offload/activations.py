"""Offloads activations from their forward pass until their backward pass.

Activations leave one after the other: while one is written the next layer computes, and the next
transfer starts once the previous one has ended. Their stores are reused.
"""

import shutil
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from windlass.atomic_files import storage_errors
from windlass.runtime.offload.backing_store import (
    BackingStore,
    BounceBuffer,
    FileBackingStore,
    HostBackingStore,
)
from windlass.runtime.offload.direct_io import round_up_to_page
from windlass.runtime.offload.transfer_queue import TransferHandle, TransferQueue, TransferStats
from windlass.schema import HOST_TIER
from windlass.torch_ext import Device, PinnedMemory


class _Offloaded(NamedTuple):
    """An activation that is offloaded, or on its way."""

    store: BackingStore
    nbytes: int
    shape: torch.Size
    dtype: torch.dtype


class ActivationOffloader:
    """The offloaded activations of one rank: outputs of layers, by micro-batch."""

    def __init__(self, queue: TransferQueue, tier: str, folder: Path, device: Device) -> None:
        self._queue, self._folder, self._device = queue, folder, device
        self._bounce = None if tier == HOST_TIER else BounceBuffer(device)
        self._memory: list[PinnedMemory] = []
        self._file_count = 0
        self._free_stores: dict[int, list[BackingStore]] = defaultdict(list)
        self._offloaded: dict[tuple[int, int], _Offloaded] = {}
        self._reloads: dict[tuple[int, int], TransferHandle] = {}
        self._last_offload: TransferHandle | None = None

    def begin_step(self) -> None:
        """Drops what a step that was aborted has left."""
        for offloaded in self._offloaded.values():
            self._free_stores[offloaded.nbytes].append(offloaded.store)
        self._offloaded.clear()
        self._reloads.clear()

    def offload(self, layer: int, micro: int, output: Tensor) -> None:
        """Starts to offload an activation, once the previous one has gone."""
        if self._last_offload is not None:
            self._last_offload.wait()
        content = _bytes_of(output.detach().contiguous())
        nbytes = content.numel()
        free = self._free_stores[nbytes]
        store = free.pop() if free else self._new_store(nbytes)
        self._offloaded[layer, micro] = _Offloaded(store, nbytes, output.shape, output.dtype)

        def transfer(stats: TransferStats) -> None:
            with storage_errors(self._folder), store.open(write=True) as handle:
                handle.write(content, 0)
            stats.written_bytes += nbytes

        self._last_offload = self._queue.submit(transfer, content)

    def reload(self, layer: int, micro: int) -> Tensor:
        """Starts to bring an activation back; it is valid after `wait_for`."""
        store, nbytes, shape, dtype = self._offloaded.pop((layer, micro))
        output = torch.empty(shape, dtype=dtype, device=self._device.torch_device)
        content = _bytes_of(output)

        def transfer(stats: TransferStats) -> None:
            with storage_errors(self._folder), store.open() as handle:
                handle.read(content, 0)
            stats.read_bytes += nbytes

        self._reloads[layer, micro] = self._queue.submit(transfer)
        # Free at once: the next activation stored there comes later in the queue.
        self._free_stores[nbytes].append(store)
        return output

    def wait_for(self, layer: int, micro: int) -> None:
        """Returns when an activation is in device memory, if it is on its way."""
        reload = self._reloads.pop((layer, micro), None)
        if reload is not None:
            reload.wait()

    def close(self) -> None:
        """Frees the memory and removes the folder; the queue must have ended."""
        if self._bounce is not None:
            self._bounce.close()
        for memory in self._memory:
            memory.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _new_store(self, nbytes: int) -> BackingStore:
        """A store for one more activation; as many are made as are ever offloaded at once."""
        if self._bounce is None:
            self._memory.append(PinnedMemory(nbytes, self._device))
            in_memory = HostBackingStore(nbytes)
            in_memory.buffer = self._memory[-1].buffer
            return in_memory
        with storage_errors(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / f"output-{self._file_count:05d}"
            in_file = FileBackingStore(path, round_up_to_page(nbytes), (self._bounce, self._bounce))
            in_file.allocate()
        self._file_count += 1
        return in_file


def _bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, `UInt8[n]`."""
    return tensor.view(-1).view(torch.uint8)
