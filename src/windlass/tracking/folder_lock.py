"""The lock of a run folder: one process at a time, released at once when its holder dies."""

import contextlib
import fcntl
import json
import os
import socket
import time
from pathlib import Path

from windlass.atomic_files import storage_errors
from windlass.errors import RecordError

_TRIES = 10
_TRY_SECONDS = 0.02


class FolderLock:
    """An exclusive file lock, held until `release` or until the process ends, however it ends.

    Args:
        path: the lock file, which is not deleted afterwards; its existence means nothing.

    Raises:
        RecordError: another process holds it; the message names it.
        StorageError: the disk is full or closed.
    """

    def __init__(self, path: Path) -> None:
        with storage_errors(path):
            self._file: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        # `is_locked` in another process takes the lock for microseconds: one failure is no proof.
        for _ in range(_TRIES):
            if _try_lock(self._file, fcntl.LOCK_EX):
                break
            time.sleep(_TRY_SECONDS)
        else:
            os.close(self._file)
            raise RecordError(f"run folder `{path.parent}` is taken by {_holder(path)}; {_WAY_OUT}")
        holder = json.dumps({"pid": os.getpid(), "host": socket.gethostname()})
        with storage_errors(path):
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, holder.encode(), 0)

    def release(self) -> None:
        """Releases the lock; releasing twice is harmless."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


_WAY_OUT = "wait for it, stop it, or train into another folder"


def is_locked(path: Path) -> bool:
    """Whether a living process holds the lock file."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not _try_lock(file, fcntl.LOCK_SH)
    finally:
        os.close(file)


def _try_lock(file: int, mode: int) -> bool:
    try:
        fcntl.flock(file, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(path: Path) -> str:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        holder = json.loads(path.read_text(encoding="utf-8"))
        return f"process {holder['pid']} on {holder['host']}"
    return "another process"
