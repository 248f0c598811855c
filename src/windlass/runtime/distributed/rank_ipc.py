"""How a rank of a run and the process that started it communicate."""

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

from windlass.atomic_files import storage_errors
from windlass.errors import MachineError, OutOfMemory, WindlassError, describe_limit
from windlass.runtime.distributed.rendezvous import is_peer_lost, write_flight_record

RANKS_FOLDER = "ranks"
"""Subfolder of the run's folder: heartbeats, failure reports and error streams of its ranks."""

STOP, STEP_RECORDED = b"s", b"t"
"""Messages to rank 0: stop after this step; the step it reported last is on record."""
WRITE_FLIGHT_RECORD = b"f"
"""Message to a rank: write its flight record."""

_REPORT_BYTES = 2**15
_LONGEST_MESSAGE = 4000
_PR_SET_PDEATHSIG = 1
"""Source: linux/prctl.h."""


def heartbeat_file(folder: Path, rank: int) -> Path:
    """The file in which a rank writes its heartbeat."""
    return folder / f"{rank}.beat"


def report_file(folder: Path, rank: int) -> Path:
    """The file in which a rank reports what went wrong."""
    return folder / f"{rank}.json"


def stderr_file(folder: Path, rank: int) -> Path:
    """The file that receives a rank's error stream: traces, warnings and thread stacks."""
    return folder / f"{rank}.err"


def flight_record_file(folder: Path, rank: int) -> Path:
    """The file in which a rank writes its last collectives when the run hangs."""
    return folder / f"{rank}.flight.json"


def reserve_report(folder: Path, rank: int) -> None:
    """Reserves space for a rank's failure report, in case the disk is full when it is written.

    Raises:
        StorageError: the disk is already full.
    """
    path = report_file(folder, rank)
    with storage_errors(path):
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b" " * _REPORT_BYTES)


def write_report(folder: Path, rank: int, error: BaseException) -> None:
    """Writes what went wrong into the reserved space.

    Args:
        error: the error; it may only be a consequence of another rank being gone.
    """
    limit = None if isinstance(error, WindlassError) else describe_limit(error)
    content = {
        "kind": MachineError.__name__ if limit else type(error).__name__,
        "is_windlass_error": isinstance(error, WindlassError) or limit is not None,
        "message": (limit or str(error) or type(error).__name__)[:_LONGEST_MESSAGE],
        "available_bytes": error.available_bytes if isinstance(error, OutOfMemory) else 0,
        "is_consequence": is_peer_lost(error),
    }
    path = report_file(folder, rank)
    with contextlib.suppress(OSError), path.open("r+b" if path.exists() else "wb") as file:
        file.write(json.dumps(content).encode().ljust(_REPORT_BYTES))


def read_report(folder: Path, rank: int) -> Mapping[str, Any] | None:
    """What a rank has reported of its failure; None if it reported nothing.

    `Any`, because the values are strings, numbers and booleans.
    """
    with contextlib.suppress(OSError, ValueError):
        report: Mapping[str, Any] = json.loads(report_file(folder, rank).read_bytes())
        return report
    return None


class ParentProcess:
    """The process that started this one. When it is gone, this process exits at once.

    Args:
        flight_record: where this process writes its flight record when it is asked to; None if it
            keeps none.
    """

    def __init__(self, flight_record: Path | None = None) -> None:
        self._flight_record = flight_record
        self._stop = threading.Event()
        self._recorded = threading.Semaphore(0)
        die_with_parent()
        faulthandler.register(signal.SIGUSR1, all_threads=True)  # the parent may ask for stacks
        threading.Thread(target=self._listen, daemon=True).start()

    def stop_requested(self) -> bool:
        """Whether the parent has asked this process to stop."""
        return self._stop.is_set()

    def wait_until_recorded(self) -> None:
        """Returns when the last reported step is on record; only then may it be saved."""
        self._recorded.acquire()

    def _listen(self) -> None:
        while message := os.read(0, 1):
            if message == STOP:
                self._stop.set()
            elif message == STEP_RECORDED:
                self._recorded.release()
            elif message == WRITE_FLIGHT_RECORD and self._flight_record is not None:
                with contextlib.suppress(OSError):
                    write_flight_record(self._flight_record)
        os._exit(1)


def die_with_parent() -> None:
    """Has the kernel kill this process when its parent is gone: a stopped process reads no pipe.

    Before this call, and on systems other than Linux, the kernel resumes the stopped process
    instead (POSIX: an orphaned process group).
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
