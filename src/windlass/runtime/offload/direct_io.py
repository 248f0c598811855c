"""Files read and written past the page cache, so that what they hold is not memory of ours.

Where the file system does not allow that (a file system in memory, some over a network), the same
calls go through the cache, and what they leave there is dropped at once.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

_Call = Callable[[int, list[memoryview], int], int]

PAGE_BYTES = 4096
"""Direct input and output wants addresses, offsets and lengths to be multiples of it."""

_BLOCK_BYTES = 8 * 2**20
"""Read or written at a time: large enough for the disk, small enough to share it."""


def round_up_to_page(nbytes: int) -> int:
    """The next multiple of a page."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def page_aligned_buffer(nbytes: int, device: torch.device | None = None) -> Tensor:
    """`UInt8[nbytes]` that begins at a page; `nbytes` must be a multiple of one.

    Args:
        nbytes: how many.
        device: where; None for a CPU. On an accelerator, which knows no pages, it begins anywhere.
    """
    if device is not None and device.type != "cpu":
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    memory = torch.empty(nbytes + PAGE_BYTES, dtype=torch.uint8)
    skipped = -memory.data_ptr() % PAGE_BYTES
    return memory[skipped : skipped + nbytes]


class DirectFile:
    """One open file.

    Args:
        path: of the file; made if it is not there and `write` is set.
        write: whether it may be written.
    """

    def __init__(self, path: Path, *, write: bool) -> None:
        flags = (os.O_RDWR | os.O_CREAT if write else os.O_RDONLY) | os.O_CLOEXEC
        self.path = path
        self._direct = True
        try:
            self._file = os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o644)
        except OSError:
            self._file = os.open(path, flags, 0o644)
            self._direct = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)

    def sync(self) -> None:
        """Returns when all that was written is on the disk."""
        os.fdatasync(self._file)

    def resize(self, nbytes: int) -> None:
        """Gives the file its size, with room on the disk for all of it."""
        if hasattr(os, "posix_fallocate") and nbytes:
            os.posix_fallocate(self._file, 0, nbytes)
        os.ftruncate(self._file, nbytes)

    def read(self, memory: Tensor, offset: int) -> None:
        """Fills memory from the file.

        Args:
            memory: `UInt8[n]`, n a multiple of a page, from `page_memory`.
            offset: in the file, a multiple of a page.

        Raises:
            OSError: the file ends before, or cannot be read.
        """
        self._move(os.preadv, memory, offset)
        self._forget(offset, memory.numel())

    def write(self, memory: Tensor, offset: int) -> None:
        """Writes memory into the file; as `read`.

        Raises:
            OSError: the disk is full, or cannot be written.
        """
        self._move(os.pwritev, memory, offset)
        if not self._direct:
            os.fdatasync(self._file)  # only clean pages can be dropped
            self._forget(offset, memory.numel())

    def _move(self, call: _Call, memory: Tensor, offset: int) -> None:
        view: memoryview = memory.numpy().data
        done = 0
        while done < len(view):
            moved = call(self._file, [view[done : done + _BLOCK_BYTES]], offset + done)
            if moved <= 0:
                raise OSError(f"`{self.path}` ends at {offset + done} bytes, {len(view)} from "
                              f"{offset} on were due")  # fmt: skip
            done += moved

    def _forget(self, offset: int, nbytes: int) -> None:
        if not self._direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file, offset, nbytes, os.POSIX_FADV_DONTNEED)
