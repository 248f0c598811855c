"""Ranks: how a device of a run and the process that started it hear of each other."""

import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from windlass.atomic_files import storage_faults
from windlass.errors import MemoryShort, WindlassError
from windlass.runtime.distributed.process_groups import is_lost

RANKS_FOLDER = "ranks"
"""In the run's folder: what its devices tell while they run."""

STOP, TAKEN = b"s", b"t"
"""What device 0 reads: it is to stop; the step that it told of last is on record."""

_REPORT_BYTES = 2**15
_LONGEST = 4000
_PR_SET_PDEATHSIG = 1
"""Source: linux/prctl.h."""


def beat_file(folder: Path, device: int) -> Path:
    """Where a device tells at which instruction it is."""
    return folder / f"{device}.beat"


def report_file(folder: Path, device: int) -> Path:
    """Where a device tells what went wrong."""
    return folder / f"{device}.json"


def error_file(folder: Path, device: int) -> Path:
    """What a device has written to its error stream: traces, warnings, stacks."""
    return folder / f"{device}.err"


def make_room(folder: Path, device: int) -> None:
    """Takes the room that a device's report may need, for a disk that is full when it is written.

    Raises:
        StorageError: the disk is full already.
    """
    path = report_file(folder, device)
    with storage_faults(path):
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b" " * _REPORT_BYTES)


def report(folder: Path, device: int, error: BaseException) -> None:
    """Tells what went wrong, in the room that was made for it.

    Args:
        folder: of the devices.
        device: that tells.
        error: which may only follow from another device being gone.
    """
    told = {
        "kind": type(error).__name__,
        "ours": isinstance(error, WindlassError),
        "message": (str(error) or type(error).__name__)[:_LONGEST],
        "room_bytes": error.room_bytes if isinstance(error, MemoryShort) else 0,
        "follows": is_lost(error),
    }
    path = report_file(folder, device)
    with contextlib.suppress(OSError), path.open("r+b" if path.exists() else "wb") as file:
        file.write(json.dumps(told).encode().ljust(_REPORT_BYTES))


def reported(folder: Path, device: int) -> Mapping[str, Any] | None:
    """What a device has told of what went wrong; None if it told nothing.

    `Any`, as it holds texts, numbers and truths.
    """
    with contextlib.suppress(OSError, ValueError):
        found: Mapping[str, Any] = json.loads(report_file(folder, device).read_bytes())
        return found
    return None


class Parent:
    """The process that started this one. When it is gone this one ends, whatever it waits for."""

    def __init__(self) -> None:
        self._stops = threading.Event()
        self._taken = threading.Semaphore(0)
        die_with_parent()
        faulthandler.register(signal.SIGUSR1, all_threads=True)  # it may ask what we are at
        threading.Thread(target=self._listen, daemon=True).start()

    def wants_stop(self) -> bool:
        """Whether it has asked us to stop."""
        return self._stops.is_set()

    def await_taken(self) -> None:
        """Returns when the step that was told last is on record: only then may it be saved."""
        self._taken.acquire()

    def _listen(self) -> None:
        while word := os.read(0, 1):
            if word == STOP:
                self._stops.set()
            elif word == TAKEN:
                self._taken.release()
        os._exit(1)


def die_with_parent() -> None:
    """Has the system kill this process when its parent is gone: one that is stopped reads no pipe.

    Before this, and elsewhere than on Linux, the system wakes it (POSIX: an orphaned group).
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
