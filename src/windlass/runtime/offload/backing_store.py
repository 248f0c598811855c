"""Where the offloaded bytes of a layer are stored: in a file, or in host memory.

Both are read and written alike, from the memory of the device that computes. The bytes of a file
pass through pinned memory on their way to an accelerator; a store in host memory is itself pinned.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from windlass.atomic_files import link_or_copy, storage_errors
from windlass.program import BOUNCE_BYTES
from windlass.runtime.checkpoint.safetensors_io import FileChecksum, PendingChecksum
from windlass.runtime.offload.direct_io import DirectFile, round_up_to_page
from windlass.schema import HOST_TIER
from windlass.torch_ext import Device, Event, PinnedMemory


class StoreHandle(Protocol):
    """An open backing store.

    Buffers are `UInt8[n]` that begin at a page, n a multiple of one. Work submitted to a device may
    still be running when a call returns.
    """

    def read(self, memory: Tensor, offset: int) -> None:
        """Fills a buffer from the store, from byte `offset` on."""

    def write(self, memory: Tensor, offset: int) -> None:
        """Writes a buffer to the store, from byte `offset` on."""


class BackingStore(Protocol):
    """Offloaded bytes that persist from step to step."""

    def allocate(self) -> None:
        """Allocates the space; previous content is lost."""

    def adopt_file(self, file: Path) -> None:
        """Takes its content from a file of the same size, which stays unchanged."""

    def open(self, *, write: bool = False) -> contextlib.AbstractContextManager[StoreHandle]:
        """Opens the store."""

    def open_for_rewrite(
        self,
    ) -> contextlib.AbstractContextManager[tuple[StoreHandle, StoreHandle]]:
        """Opens the store to rewrite all of it: the handle to read from and the one to write to.

        They differ only if the old content must be kept.
        """

    def save_as(self, to: Path, write_tail: Callable[[StoreHandle], None]) -> PendingChecksum:
        """Writes the current content to a file that later changes do not affect.

        Args:
            to: the file; must not exist.
            write_tail: writes what updates have not written.
        """


class BackingStores:
    """Creates the backing stores of one run."""

    def __init__(self, folder: Path, device: Device) -> None:
        self._folder, self._device = folder, device
        self._bounce_buffers: list[BounceBuffer] = []
        self._host_memory: list[PinnedMemory] = []
        self._unallocated: list[HostBackingStore] = []

    def create(self, tier: str, name: str, nbytes: int) -> BackingStore:
        """A new store; one in host memory is usable after `allocate_host_memory`.

        Args:
            nbytes: size in bytes, a multiple of a page.
        """
        if tier != HOST_TIER:
            with storage_errors(self._folder):
                self._folder.mkdir(parents=True, exist_ok=True)
            bounce = self._two_bounce_buffers() if self._device.is_asynchronous else None
            return FileBackingStore(self._folder / name, nbytes, bounce)
        self._unallocated.append(HostBackingStore(nbytes))
        return self._unallocated[-1]

    @contextlib.contextmanager
    def open_file(self, path: Path) -> Iterator[StoreHandle]:
        """Opens a file of somebody else's, of which any bytes are read and none is written."""
        with DirectFile(path, write=False, in_pages=False) as file:
            is_bounced = self._device.is_asynchronous
            yield BouncedFile(file, *self._two_bounce_buffers()) if is_bounced else file

    def allocate_host_memory(self) -> None:
        """Allocates the memory of all new stores in host memory, in one piece.

        Raises:
            OSError: the host does not have so much memory.
        """
        stores, self._unallocated = self._unallocated, []
        if not stores:
            return
        memory = PinnedMemory(sum(store.nbytes for store in stores), self._device)
        self._host_memory.append(memory)
        offset = 0
        for store in stores:
            store.buffer = memory.buffer[offset : offset + store.nbytes]
            offset += store.nbytes

    def close(self) -> None:
        """Frees the host memory."""
        for bounce in self._bounce_buffers:
            bounce.close()
        for memory in self._host_memory:
            memory.close()

    def _two_bounce_buffers(self) -> "tuple[BounceBuffer, BounceBuffer]":
        while len(self._bounce_buffers) < 2:
            self._bounce_buffers.append(BounceBuffer(self._device))
        return self._bounce_buffers[0], self._bounce_buffers[1]


class HostBackingStore:
    """A backing store in host memory."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.buffer = torch.empty(0, dtype=torch.uint8)
        """`UInt8[nbytes]`, set by the owner of the memory."""

    def allocate(self) -> None:
        """Does nothing: the memory is there, and every byte that matters is written."""

    def adopt_file(self, file: Path) -> None:
        """Reads a file of the same size into memory.

        Raises:
            OSError: the file cannot be read, or is too short.
        """
        view, done = _view(self.buffer), 0
        with file.open("rb", buffering=0) as content:
            while done < self.nbytes:
                count = content.readinto(view[done : done + BOUNCE_BYTES])
                if not count:
                    raise OSError(
                        f"`{file}` ends at {done} bytes, but {self.nbytes} bytes were expected"
                    )
                done += count

    @contextlib.contextmanager
    def open(self, *, write: bool = False) -> Iterator[StoreHandle]:
        """The store itself."""
        del write
        yield self

    @contextlib.contextmanager
    def open_for_rewrite(self) -> Iterator[tuple[StoreHandle, StoreHandle]]:
        """The store itself, twice: no checkpoint refers to its memory."""
        yield self, self

    def read(self, memory: Tensor, offset: int) -> None:
        """Copies from the store; on an accelerator, submits the copy."""
        memory.copy_(self.buffer[offset : offset + memory.numel()], non_blocking=True)

    def write(self, memory: Tensor, offset: int) -> None:
        """Copies to the store; on an accelerator, submits the copy."""
        self.buffer[offset : offset + memory.numel()].copy_(memory, non_blocking=True)

    def save_as(self, to: Path, write_tail: Callable[[StoreHandle], None]) -> PendingChecksum:
        """Writes the bytes to a file, and flushes it to the disk."""
        write_tail(self)
        view, digest = _view(self.buffer), hashlib.sha256()
        with to.open("xb") as file:
            for start in range(0, self.nbytes, BOUNCE_BYTES):
                block = view[start : start + BOUNCE_BYTES]
                file.write(block)
                digest.update(block)
            file.flush()
            os.fsync(file.fileno())
        checksum = FileChecksum(bytes=self.nbytes, sha256=digest.hexdigest())
        return lambda: checksum


class FileBackingStore:
    """A backing store in a file.

    Args:
        bounce: the buffers that bytes pass through, one for reading and one for writing; None for
            direct transfers.
    """

    def __init__(
        self, path: Path, nbytes: int, bounce: "tuple[BounceBuffer, BounceBuffer] | None" = None
    ) -> None:
        self._path, self._nbytes, self._bounce = path, nbytes, bounce
        self._in_checkpoint = False
        """Whether a checkpoint holds a hard link to the file, which then must not change."""

    def allocate(self) -> None:
        """Creates a new file, with disk space for all of it."""
        self._path.unlink(missing_ok=True)
        self._in_checkpoint = False
        with DirectFile(self._path, write=True) as file:
            file.resize(self._nbytes)

    def adopt_file(self, file: Path) -> None:
        """Makes a hard link to a file; copies it where links cannot be made."""
        self._path.unlink(missing_ok=True)
        self._in_checkpoint = link_or_copy(file, self._path)

    @contextlib.contextmanager
    def open(self, *, write: bool = False) -> Iterator[StoreHandle]:
        """Opens the file."""
        with DirectFile(self._path, write=write) as file:
            yield self._handle(file)

    @contextlib.contextmanager
    def open_for_rewrite(self) -> Iterator[tuple[StoreHandle, StoreHandle]]:
        """Opens the file; a file in a checkpoint is replaced by a new one on exit."""
        with contextlib.ExitStack() as stack:
            source = stack.enter_context(DirectFile(self._path, write=True))
            if not self._in_checkpoint:
                handle = self._handle(source)
                yield handle, handle
                return
            path = self._path.with_suffix(".next")
            path.unlink(missing_ok=True)
            target = stack.enter_context(DirectFile(path, write=True))
            target.resize(self._nbytes)
            yield self._handle(source), self._handle(target)
            path.rename(self._path)
            self._in_checkpoint = False

    def save_as(self, to: Path, write_tail: Callable[[StoreHandle], None]) -> PendingChecksum:
        """Makes a hard link to the current file; copies it where links cannot be made."""
        if not self._in_checkpoint:
            with DirectFile(self._path, write=True) as file:
                write_tail(file)
                file.sync()
        self._in_checkpoint = link_or_copy(self._path, to)
        return lambda: FileChecksum.of(to)

    def _handle(self, file: DirectFile) -> StoreHandle:
        return file if self._bounce is None else BouncedFile(file, *self._bounce)


class BounceBuffer:
    """Two halves of pinned memory that a file's bytes pass through, for one thread at a time.

    While the device copies one half, the file reads or writes the other.
    """

    def __init__(self, device: Device) -> None:
        self._memory = PinnedMemory(2 * BOUNCE_BYTES, device)
        self.halves: tuple[Tensor, ...] = self._memory.buffer.split(BOUNCE_BYTES)
        """`UInt8[BOUNCE_BYTES]` each."""
        self.copy_done: tuple[Event, ...] = tuple(device.new_event() for _ in range(2))
        """Event after the device's copy from or to each half."""

    def close(self) -> None:
        """Frees the memory."""
        self.halves = ()
        self._memory.close()


class BouncedFile:
    """A file whose bytes pass through bounce buffers; device buffers may be any."""

    def __init__(
        self, file: DirectFile, read_buffer: BounceBuffer, write_buffer: BounceBuffer
    ) -> None:
        self._file, self._read_buffer, self._write_buffer = file, read_buffer, write_buffer

    def read(self, memory: Tensor, offset: int) -> None:
        """Reads half by half; the device's copies may still be running when it returns."""
        bounce = self._read_buffer
        for index, (start, block) in enumerate(_blocks(memory)):
            half, copy_done = bounce.halves[index % 2], bounce.copy_done[index % 2]
            copy_done.synchronize()
            self._file.read(half[: self._file.transferred(block.numel())], offset + start)
            block.copy_(half[: block.numel()], non_blocking=True)
            copy_done.record()

    def write(self, memory: Tensor, offset: int) -> None:
        """Writes half by half, padded with zeros to a page; on return all is in the file."""
        bounce, previous = self._write_buffer, None
        for index, (start, block) in enumerate(_blocks(memory)):
            half, copy_done = bounce.halves[index % 2], bounce.copy_done[index % 2]
            half[: block.numel()].copy_(block, non_blocking=True)
            copy_done.record()
            if previous is not None:
                self._write_half(*previous)
            previous = (half, block.numel(), copy_done, offset + start)
        if previous is not None:
            self._write_half(*previous)

    def _write_half(self, half: Tensor, nbytes: int, copy_done: Event, offset: int) -> None:
        copy_done.synchronize()
        half[nbytes : round_up_to_page(nbytes)].zero_()
        self._file.write(half[: round_up_to_page(nbytes)], offset)


def _view(memory: Tensor) -> memoryview:
    view: memoryview = memory.numpy().data
    return view


def _blocks(memory: Tensor) -> Iterator[tuple[int, Tensor]]:
    for start in range(0, memory.numel(), BOUNCE_BYTES):
        yield start, memory[start : start + BOUNCE_BYTES]
