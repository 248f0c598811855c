"""Beat: at which step and instruction a device is, for whoever watches it from another process.

Two numbers in a mapped file. To write one costs as much as to write it to memory.
"""

import mmap
from pathlib import Path
from typing import Protocol

_NUMBERS = 2
_BYTES = 8 * _NUMBERS


NO_BEAT = (0, -1)
"""Before the first step."""


class Marks(Protocol):
    """Where a device writes its step, at 0, and the index of its instruction, at 1."""

    def __setitem__(self, at: int, value: int, /) -> None: ...


class Pulse:
    """The writing end.

    Args:
        path: made anew.
    """

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(_BYTES))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _BYTES)
        self.numbers: memoryview = memoryview(self._map).cast("q")
        """The step, and the index of the instruction that begins."""
        self.numbers[1] = -1

    def close(self) -> None:
        """Ends writing."""
        self.numbers.release()
        self._map.close()


class Beat:
    """The reading end.

    Args:
        path: which need not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._map: mmap.mmap | None = None

    def at(self) -> tuple[int, int]:
        """Step and index of the instruction; (0, -1) before there is one."""
        if self._map is None:
            try:
                with self._path.open("rb") as file:
                    self._map = mmap.mmap(file.fileno(), _BYTES, prot=mmap.PROT_READ)
            except (OSError, ValueError):
                return NO_BEAT
        step = int.from_bytes(self._map[:8], "little", signed=True)
        return step, int.from_bytes(self._map[8:_BYTES], "little", signed=True)

    def close(self) -> None:
        """Ends reading."""
        if self._map is not None:
            self._map.close()
