"""Ranks: how a device of a run and the process that started it hear of each other."""

import faulthandler
import json
import os
import signal
import threading
from pathlib import Path

from windlass.errors import MemoryShort
from windlass.runtime.world import is_lost

RANKS_FOLDER = "ranks"
"""In the run's folder: what its devices tell while they run."""

STOP, TAKEN = b"s", b"t"
"""What device 0 reads: it is to stop; the step that it told of last is on record."""


def beat_file(folder: Path, device: int) -> Path:
    """Where a device tells at which instruction it is."""
    return folder / f"{device}.beat"


def report_file(folder: Path, device: int) -> Path:
    """Where a device tells what went wrong."""
    return folder / f"{device}.json"


def report(folder: Path, device: int, error: BaseException) -> None:
    """Tells what went wrong.

    Args:
        folder: of the devices.
        device: that tells.
        error: which may only follow from another device being gone.
    """
    told = {
        "kind": type(error).__name__,
        "message": str(error) or type(error).__name__,
        "room_bytes": error.room_bytes if isinstance(error, MemoryShort) else 0,
        "follows": is_lost(error),
    }
    beside = report_file(folder, device).with_suffix(".tmp")
    beside.write_text(json.dumps(told))
    beside.rename(report_file(folder, device))


class Parent:
    """The process that started this one. When it is gone this one ends, whatever it waits for."""

    def __init__(self) -> None:
        self._stops = threading.Event()
        self._taken = threading.Semaphore(0)
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
