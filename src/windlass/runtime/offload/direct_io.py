"""Files read and written without the page cache, so that their content takes no memory.

Where the file system does not support direct I/O (one in memory, some over a network), the same
calls go through the cache, and the cached pages are dropped at once.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from windlass.torch_ext import Device

_Call = Callable[[int, list[memoryview], int], int]

PAGE_BYTES = 4096
"""Direct I/O requires addresses, offsets and lengths to be multiples of this."""

_BLOCK_BYTES = 8 * 2**20
"""Bytes per system call: large enough for the disk, small enough to share it."""


def round_up_to_page(nbytes: int) -> int:
    """The next multiple of a page."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def page_aligned_buffer(nbytes: int, device: Device | None = None) -> Tensor:
    """A new buffer `UInt8[nbytes]` that begins at a page; `nbytes` must be a multiple of one.

    Args:
        device: where to allocate it; None for a CPU. An accelerator has no pages, and the buffer
            may begin anywhere.
    """
    if device is not None and device.kind != "cpu":
        return torch.empty(nbytes, dtype=torch.uint8, device=device.torch_device)
    memory = torch.empty(nbytes + PAGE_BYTES, dtype=torch.uint8)
    skipped = -memory.data_ptr() % PAGE_BYTES
    return memory[skipped : skipped + nbytes]


class DirectFile:
    """An open file.

    Args:
        in_pages: whether whole pages are transferred, which direct I/O requires; otherwise any
            bytes, through the cache.
    """

    def __init__(self, path: Path, *, write: bool, in_pages: bool = True) -> None:
        flags = (os.O_RDWR | os.O_CREAT if write else os.O_RDONLY) | os.O_CLOEXEC
        self.path = path
        self._in_pages = self._direct = in_pages
        try:
            direct = getattr(os, "O_DIRECT", 0) if in_pages else 0
            self._file = os.open(path, flags | direct, 0o644)
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

    def transferred(self, nbytes: int) -> int:
        """Bytes to transfer for so many of a buffer: whole pages, where that is required."""
        return round_up_to_page(nbytes) if self._in_pages else nbytes

    def sync(self) -> None:
        """Returns when everything written is on the disk."""
        os.fdatasync(self._file)

    def resize(self, nbytes: int) -> None:
        """Sets the file's size, and allocates disk space for all of it."""
        if hasattr(os, "posix_fallocate") and nbytes:
            os.posix_fallocate(self._file, 0, nbytes)
        os.ftruncate(self._file, nbytes)

    def read(self, memory: Tensor, offset: int) -> None:
        """Fills a buffer from the file.

        Args:
            memory: `UInt8[n]` from `page_aligned_buffer`, n a multiple of a page.
            offset: position in the file, a multiple of a page.

        Raises:
            OSError: the file is too short, or cannot be read.
        """
        self._transfer(os.preadv, memory, offset)
        self._drop_cached(offset, memory.numel())

    def write(self, memory: Tensor, offset: int) -> None:
        """Writes a buffer to the file; arguments as for `read`."""
        self._transfer(os.pwritev, memory, offset)
        if not self._direct:
            os.fdatasync(self._file)  # only clean pages can be dropped
            self._drop_cached(offset, memory.numel())

    def _transfer(self, call: _Call, memory: Tensor, offset: int) -> None:
        view: memoryview = memory.numpy().data
        done = 0
        while done < len(view):
            count = call(self._file, [view[done : done + _BLOCK_BYTES]], offset + done)
            if count <= 0:
                raise OSError(
                    f"`{self.path}` ends at {offset + done} bytes, but {len(view)} bytes from "
                    f"{offset} on were expected"
                )
            done += count

    def _drop_cached(self, offset: int, nbytes: int) -> None:
        if not self._direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file, offset, nbytes, os.POSIX_FADV_DONTNEED)
