"""Shelves: where bytes of a layer lie beyond the near tier, in a file or in memory of the host.

Both are read and written alike, from memory of whichever device computes. A file whose bytes are
for an accelerator passes through pinned memory; what lies in memory of the host is pinned itself.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from windlass.atomic_files import hash_file, storage_errors
from windlass.program.memory.values import BOUNCE_BYTES
from windlass.runtime.checkpoint.safetensors_io import FileChecksum, PendingChecksum
from windlass.runtime.offload.cuda_streams import StreamEvent, stream_module
from windlass.runtime.offload.direct_io import DirectFile, round_up_to_page
from windlass.runtime.offload.pinned_memory import PinnedMemory
from windlass.schema.plan import HOST_TIER


class StoreHandle(Protocol):
    """An open shelf.

    Memory is `UInt8[n]` that begins at a page, n a multiple of one. What is asked of a device may
    still be under way when a call returns.
    """

    def read(self, memory: Tensor, offset: int) -> None:
        """Fills memory from the shelf."""

    def write(self, memory: Tensor, offset: int) -> None:
        """Writes memory to the shelf."""


class BackingStore(Protocol):
    """Bytes that stay from step to step."""

    def make(self) -> None:
        """Takes the room; whatever was there is gone."""

    def adopt(self, file: Path) -> None:
        """Takes over a whole file of the same size, which stays as it is."""

    def opened(self, *, write: bool = False) -> contextlib.AbstractContextManager[StoreHandle]:
        """The shelf, open."""

    def changing(self) -> contextlib.AbstractContextManager[tuple[StoreHandle, StoreHandle]]:
        """Where from and where to, to write all of it anew; two only if the old must stay."""

    def save(self, to: Path, tail: Callable[[StoreHandle], None]) -> PendingChecksum:
        """Makes a file of what is there now, which later changes leave alone.

        Args:
            to: the file; not there yet.
            tail: writes what was left open in changes before.
        """


class BackingStores:
    """Makes the shelves of one run.

    Args:
        folder: of all files.
        device: that computes.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._folder, self._device = folder, device
        self._bounces: list[BounceBuffer] = []
        self._arenas: list[PinnedMemory] = []
        self._waiting: list[HostBackingStore] = []

    def shelf(self, tier: str, name: str, nbytes: int) -> BackingStore:
        """A shelf of so many bytes, a multiple of a page; `host` ones are there after `take`.

        Raises:
            StorageError: the folder cannot be made.
        """
        if tier != HOST_TIER:
            with storage_errors(self._folder):
                self._folder.mkdir(parents=True, exist_ok=True)
            bounces = self._two_bounces() if self._device.type != "cpu" else None
            return FileBackingStore(self._folder / name, nbytes, bounces)
        self._waiting.append(HostBackingStore(nbytes))
        return self._waiting[-1]

    def take(self) -> None:
        """Takes the host's memory for all shelves that were made since, in one piece.

        Raises:
            OSError: there is not so much.
        """
        due, self._waiting = self._waiting, []
        if not due:
            return
        arena = PinnedMemory(sum(shelf.nbytes for shelf in due), self._device)
        self._arenas.append(arena)
        at = 0
        for shelf in due:
            shelf.bytes = arena.bytes[at : at + shelf.nbytes]
            at += shelf.nbytes

    def close(self) -> None:
        """Gives the host's memory back."""
        for bounce in self._bounces:
            bounce.close()
        for arena in self._arenas:
            arena.close()

    def _two_bounces(self) -> "tuple[BounceBuffer, BounceBuffer]":
        while len(self._bounces) < 2:
            self._bounces.append(BounceBuffer(self._device))
        return self._bounces[0], self._bounces[1]


class HostBackingStore:
    """Bytes in memory of the host.

    Args:
        nbytes: how many.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.bytes = torch.empty(0, dtype=torch.uint8)
        """Given by whoever owns the memory."""

    def make(self) -> None:
        """Nothing is to be done: the room is there, and what counts of it is written."""

    def adopt(self, file: Path) -> None:
        """Reads a file of the same size into memory.

        Raises:
            OSError: it cannot be read, or ends before.
        """
        view, done = _view(self.bytes), 0
        with file.open("rb", buffering=0) as content:
            while done < self.nbytes:
                count = content.readinto(view[done : done + BOUNCE_BYTES])
                if not count:
                    raise OSError(f"`{file}` ends at {done} bytes, {self.nbytes} were due")
                done += count

    @contextlib.contextmanager
    def opened(self, *, write: bool = False) -> Iterator[StoreHandle]:
        """The shelf itself."""
        del write
        yield self

    @contextlib.contextmanager
    def changing(self) -> Iterator[tuple[StoreHandle, StoreHandle]]:
        """The shelf itself: nobody else knows its memory."""
        yield self, self

    def read(self, memory: Tensor, offset: int) -> None:
        """Copies from the shelf; on an accelerator, asks it to."""
        memory.copy_(self.bytes[offset : offset + memory.numel()], non_blocking=True)

    def write(self, memory: Tensor, offset: int) -> None:
        """Copies to the shelf; on an accelerator, asks it to."""
        self.bytes[offset : offset + memory.numel()].copy_(memory, non_blocking=True)

    def save(self, to: Path, tail: Callable[[StoreHandle], None]) -> PendingChecksum:
        """Writes the bytes as they are into a file, and flushes it to the disk."""
        tail(self)
        view, digest = _view(self.bytes), hashlib.sha256()
        with to.open("xb") as file:
            for start in range(0, self.nbytes, BOUNCE_BYTES):
                block = view[start : start + BOUNCE_BYTES]
                file.write(block)
                digest.update(block)
            file.flush()
            os.fsync(file.fileno())
        proof = FileChecksum(bytes=self.nbytes, sha256=digest.hexdigest())
        return lambda: proof


class FileBackingStore:
    """Bytes in a file.

    Args:
        path: of the file.
        nbytes: how many.
        bounces: that they pass through, one for reading and one for writing; None: straight.
    """

    def __init__(
        self, path: Path, nbytes: int, bounces: "tuple[BounceBuffer, BounceBuffer] | None" = None
    ) -> None:
        self._path, self._nbytes, self._bounces = path, nbytes, bounces
        self._shared = False
        """A checkpoint has the file under another name: it must not change."""

    def make(self) -> None:
        """A new file, with room on the disk for all of it."""
        self._path.unlink(missing_ok=True)
        self._shared = False
        with DirectFile(self._path, write=True) as file:
            file.resize(self._nbytes)

    def adopt(self, file: Path) -> None:
        """Gives a file a second name, and copies nothing."""
        self._path.unlink(missing_ok=True)
        os.link(file, self._path)
        self._shared = True

    @contextlib.contextmanager
    def opened(self, *, write: bool = False) -> Iterator[StoreHandle]:
        """The file, open."""
        with DirectFile(self._path, write=write) as file:
            yield self._access(file)

    @contextlib.contextmanager
    def changing(self) -> Iterator[tuple[StoreHandle, StoreHandle]]:
        """The file, and a new one beside it that takes its name if the old one has another too."""
        with contextlib.ExitStack() as stack:
            source = stack.enter_context(DirectFile(self._path, write=True))
            if not self._shared:
                access = self._access(source)
                yield access, access
                return
            path = self._path.with_suffix(".next")
            path.unlink(missing_ok=True)
            into = stack.enter_context(DirectFile(path, write=True))
            into.resize(self._nbytes)
            yield self._access(source), self._access(into)
            path.rename(self._path)
            self._shared = False

    def save(self, to: Path, tail: Callable[[StoreHandle], None]) -> PendingChecksum:
        """Gives the file, as it is now, a second name, and copies nothing."""
        if not self._shared:
            with DirectFile(self._path, write=True) as file:
                tail(file)
                file.sync()
        os.link(self._path, to)
        self._shared = True
        return lambda: FileChecksum(bytes=to.stat().st_size, sha256=hash_file(to))

    def _access(self, file: DirectFile) -> StoreHandle:
        return file if self._bounces is None else BouncedFile(file, *self._bounces)


class BounceBuffer:
    """Two halves of the host's memory that a file's bytes pass through, for one thread at a time.

    While the device copies one half, the file reads or writes the other.

    Args:
        device: that copies.
    """

    def __init__(self, device: torch.device) -> None:
        self._memory = PinnedMemory(2 * BOUNCE_BYTES, device)
        self.halves: tuple[Tensor, ...] = self._memory.bytes.split(BOUNCE_BYTES)
        self.copied: tuple[StreamEvent, ...] = tuple(stream_module(device).Event() for _ in range(2))
        """When the device has done with each half."""

    def close(self) -> None:
        """Gives the memory back."""
        self.halves = ()
        self._memory.close()


class BouncedFile:
    """A file whose bytes pass through a bounce; memory may have any size and lie anywhere.

    Args:
        file: open.
        reading: for what is read.
        writing: for what is written.
    """

    def __init__(self, file: DirectFile, reading: BounceBuffer, writing: BounceBuffer) -> None:
        self._file, self._reading, self._writing = file, reading, writing

    def read(self, memory: Tensor, offset: int) -> None:
        """Reads half after half; the device's copies may be under way when it returns."""
        bounce = self._reading
        for turn, (at, part) in enumerate(_blocks(memory)):
            half, copied = bounce.halves[turn % 2], bounce.copied[turn % 2]
            copied.synchronize()
            self._file.read(half[: round_up_to_page(part.numel())], offset + at)
            part.copy_(half[: part.numel()], non_blocking=True)
            copied.record()

    def write(self, memory: Tensor, offset: int) -> None:
        """Writes half after half, zeros up to the next page at the end; then all is in the file."""
        bounce, before = self._writing, None
        for turn, (at, part) in enumerate(_blocks(memory)):
            half, copied = bounce.halves[turn % 2], bounce.copied[turn % 2]
            half[: part.numel()].copy_(part, non_blocking=True)
            copied.record()
            if before is not None:
                self._put(*before)
            before = (half, part.numel(), copied, offset + at)
        if before is not None:
            self._put(*before)

    def _put(self, half: Tensor, nbytes: int, copied: StreamEvent, offset: int) -> None:
        copied.synchronize()
        half[nbytes : round_up_to_page(nbytes)].zero_()
        self._file.write(half[: round_up_to_page(nbytes)], offset)


def _view(memory: Tensor) -> memoryview:
    view: memoryview = memory.numpy().data
    return view


def _blocks(memory: Tensor) -> Iterator[tuple[int, Tensor]]:
    for at in range(0, memory.numel(), BOUNCE_BYTES):
        yield at, memory[at : at + BOUNCE_BYTES]
