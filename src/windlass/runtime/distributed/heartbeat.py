"""Beat: at which step and instruction a device is, for whoever watches it from another process.

Three numbers in a mapped file. To write one costs as much as to write it to memory.
"""

import mmap
import struct
from pathlib import Path
from typing import Protocol

_NUMBERS = 3
_LAYOUT = struct.Struct(f"={_NUMBERS}q")
_BYTES = _LAYOUT.size

NO_BEAT = (0, -1)
"""Before the first step."""


class Marks(Protocol):
    """Where a device writes its step, at 0, and the index of its instruction, at 1.

    At 2 it counts what it has done beside its instructions: saving, evaluating.
    """

    def __getitem__(self, at: int, /) -> int: ...

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
        """The step, the index of the instruction that begins, and a count of other work."""
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
        step, index, _ = self.signs()
        return step, index

    def signs(self) -> tuple[int, int, int]:
        """All that changes while the device goes on: also the count of its other work."""
        if self._map is None:
            try:
                with self._path.open("rb") as file:
                    self._map = mmap.mmap(file.fileno(), _BYTES, prot=mmap.PROT_READ)
            except (OSError, ValueError):
                return (*NO_BEAT, 0)
        step, index, other = _LAYOUT.unpack(self._map[:_BYTES])
        return step, index, other

    def close(self) -> None:
        """Ends reading."""
        if self._map is not None:
            self._map.close()
