"""Heartbeat: the step and instruction a rank is at, readable from another process.

Three integers in a memory-mapped file. Writing one costs as much as a store to memory.
"""

import mmap
import struct
from pathlib import Path

_SLOTS = 3
_LAYOUT = struct.Struct(f"={_SLOTS}q")
_BYTES = _LAYOUT.size

NOT_STARTED = (0, -1)
"""Position before the first step."""


class HeartbeatWriter:
    """The writing end of a heartbeat file.

    Args:
        path: the file; created anew.
    """

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(_BYTES))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _BYTES)
        self.slots: memoryview = memoryview(self._map).cast("q")
        """The step, the index of the current instruction, and a count of other work."""
        self.slots[1] = -1

    def close(self) -> None:
        """Unmaps the file."""
        self.slots.release()
        self._map.close()


class HeartbeatReader:
    """The reading end of a heartbeat file.

    Args:
        path: the file; it may not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._map: mmap.mmap | None = None

    def position(self) -> tuple[int, int]:
        """Step and index of the current instruction; `NOT_STARTED` before the first one."""
        step, index, _ = self.read()
        return step, index

    def read(self) -> tuple[int, int, int]:
        """All three slots: step, index of the current instruction, count of other work."""
        if self._map is None:
            try:
                with self._path.open("rb") as file:
                    self._map = mmap.mmap(file.fileno(), _BYTES, prot=mmap.PROT_READ)
            except (OSError, ValueError):
                return (*NOT_STARTED, 0)
        step, index, extra_work = _LAYOUT.unpack(self._map[:_BYTES])
        return step, index, extra_work

    def close(self) -> None:
        """Unmaps the file."""
        if self._map is not None:
            self._map.close()
