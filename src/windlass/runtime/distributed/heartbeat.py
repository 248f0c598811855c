"""Heartbeat: the step and instruction a rank is at, readable from another process.

Three integers in a memory-mapped file. Writing one costs as much as a store to memory. The host of
an accelerator is far ahead of its device, so there a thread writes which instruction the device has
not finished.
"""

import mmap
import struct
import threading
from array import array
from collections.abc import Callable
from pathlib import Path

from windlass.runtime.interpreter import OTHER_WORK_SLOT, HeartbeatSlots
from windlass.torch_ext import Device

_SLOTS = 3
_LAYOUT = struct.Struct(f"={_SLOTS}q")
_BYTES = _LAYOUT.size

NOT_STARTED = (0, -1)
"""Position before the first step."""

_DEVICE_SECONDS = 0.5
"""Time between two looks at a device's place; a fraction of the shortest hang timeout in use."""


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
        step, index, other_work = _LAYOUT.unpack(self._map[:_BYTES])
        return step, index, other_work

    def close(self) -> None:
        """Unmaps the file."""
        if self._map is not None:
            self._map.close()


class DeviceHeartbeat:
    """Writes a device's place to a heartbeat in a thread; the host writes its own elsewhere."""

    def __init__(
        self, heartbeat: HeartbeatSlots, finished_calls: Callable[[int], int], device: Device
    ) -> None:
        self.host_slots: HeartbeatSlots = array("q", [heartbeat[slot] for slot in range(_SLOTS)])
        """The slots that the host writes."""
        self._heartbeat, self._finished_calls, self._device = heartbeat, finished_calls, device
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._write_often, daemon=True)
        self._thread.start()

    def _write_often(self) -> None:
        self._device.activate()
        while not self._closed.wait(_DEVICE_SECONDS):
            self.write()

    def write(self) -> None:
        """Writes the step, the first instruction that the device has not finished, and the rest."""
        step, index, other_work = (self.host_slots[slot] for slot in range(_SLOTS))
        self._heartbeat[0] = step
        self._heartbeat[1] = self._finished_calls(index) if index > 0 else index
        self._heartbeat[OTHER_WORK_SLOT] = other_work

    def close(self) -> None:
        """Ends the thread; the last place stays."""
        self._closed.set()
        self._thread.join()


_SECONDS = 1.0
"""Time between two signs of life; a fraction of the shortest hang timeout in use."""
_LONGEST_SECONDS = 1800.0
"""Time after which a compilation counts as progress no more: what takes longer hangs."""


class CompileHeartbeat:
    """Counts the seconds in which torch compiles as work of this rank.

    Args:
        longest_seconds: time after which a compilation counts as progress no more.
    """

    def __init__(
        self,
        slots: HeartbeatSlots,
        *,
        seconds: float = _SECONDS,
        longest_seconds: float = _LONGEST_SECONDS,
    ) -> None:
        from torch._dynamo.callback import callback_handler

        self._slots, self._seconds, self._longest = slots, seconds, longest_seconds
        self._ended: threading.Event | None = None
        self._callbacks = callback_handler
        callback_handler.register_start_callback(self._begin)
        callback_handler.register_end_callback(self._end)

    def close(self) -> None:
        """Counts nothing any more."""
        self._end()
        self._callbacks.remove_start_callback(self._begin)
        self._callbacks.remove_end_callback(self._end)

    def _begin(self, _: object) -> None:
        ended = self._ended = threading.Event()
        threading.Thread(target=self._count, args=(ended,), daemon=True).start()

    def _end(self, _: object = None) -> None:
        if self._ended is not None:
            self._ended.set()
            self._ended = None

    def _count(self, ended: threading.Event) -> None:
        for _ in range(round(self._longest / self._seconds)):
            self._slots[OTHER_WORK_SLOT] += 1
            if ended.wait(self._seconds):
                return
