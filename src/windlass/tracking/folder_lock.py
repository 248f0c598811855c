"""The lock of a run folder, released when its holder dies, and what the next holder finds there.

A folder that is written to holds no links: it may come from somebody else, and what was written
through a link would change files elsewhere.
"""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import socket
import stat
import time
from pathlib import Path

from windlass.atomic_files import remove_temporary_files, storage_errors
from windlass.errors import RecordError
from windlass.schema import (
    ATTEMPTS_FOLDER,
    CHAT_TEMPLATE_FILE,
    CHECKPOINT_FOLDER,
    CODE_FILE,
    CONFIG_FILE,
    DATA_FILE,
    ENVIRONMENT_FILE,
    EXAMPLES_FILE,
    GENERATION_CONFIG_FILE,
    GRAPH_FILE,
    JOBSET_FILE,
    JOURNAL_FOLDER,
    LAUNCH_FILE,
    LAUNCH_SECRET_FILE,
    MACHINE_FILE,
    MODEL_CONFIG_FILE,
    PLAN_FILE,
    PREDICTED_TIMELINE_FILE,
    PREDICTION_FILE,
    PROGRAM_FILE,
    RAY_FILE,
    REQUEST_FILE,
    SLURM_FILE,
    SPECIAL_TOKENS_FILE,
    TASKS_FOLDER,
    TOKENIZER_FILE,
    TOKENS_FOLDER,
    TRAINJOB_FILE,
)

LOCK_FILE = ".lock"
ID_FILE = "id"
"""Its first line is the run's id, its second `format N`."""
OWN_NAMES = frozenset(
    {LOCK_FILE, JOURNAL_FOLDER, CONFIG_FILE, REQUEST_FILE, PLAN_FILE, GRAPH_FILE, MACHINE_FILE,
     PREDICTION_FILE, PROGRAM_FILE, PREDICTED_TIMELINE_FILE, ENVIRONMENT_FILE, CODE_FILE, DATA_FILE,
     TOKENS_FOLDER, EXAMPLES_FILE, TOKENIZER_FILE, CHAT_TEMPLATE_FILE, SPECIAL_TOKENS_FILE,
     MODEL_CONFIG_FILE, GENERATION_CONFIG_FILE, TASKS_FOLDER, LAUNCH_FILE,
     LAUNCH_SECRET_FILE, SLURM_FILE, JOBSET_FILE, TRAINJOB_FILE, RAY_FILE}
)  # fmt: skip
"""What a run folder holds before its id is written."""
START_FILE = ".starting"
"""Stands in a folder while a run is made in it: until the id is written, all is without worth."""
_TRIES = 10
_TRY_SECONDS = 0.02


class FolderLock:
    """An exclusive file lock, held until `release` or until the process ends, however it ends.

    Args:
        path: the lock file, which is not deleted afterwards; its existence means nothing.

    Raises:
        RecordError: another process holds it, whom the message names, or it is a link.
        StorageError: the disk is full or closed.
    """

    def __init__(self, path: Path) -> None:
        self._file: int | None = _open(path)
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


def is_unfinished_start(folder: Path) -> bool:
    """Whether somebody who made a run in a folder was killed before it was one."""
    return (folder / START_FILE).is_file() and not (folder / ID_FILE).is_file()


def remove_leftovers(folder: Path) -> None:
    """Removes what killed processes have left in a folder that this process has locked.

    Raises:
        RecordError: something in it is a link.
    """
    require_no_links(folder)
    for each in (folder, folder / TASKS_FOLDER, *(folder / ATTEMPTS_FOLDER).glob("*")):
        remove_temporary_files(each)
    names = OWN_NAMES - {LOCK_FILE} | {CHECKPOINT_FOLDER} if is_unfinished_start(folder) else ()
    for path in (folder / name for name in names):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    (folder / START_FILE).unlink(missing_ok=True)


def require_no_links(folder: Path) -> None:
    """Refuses a folder to write to in which anything is a link.

    Raises:
        RecordError: there is one; the message names the first.
    """
    for path, folders, files in os.walk(folder):
        for name in sorted((*folders, *files)):
            if (link := Path(path, name)).is_symlink():
                raise RecordError(_describe_link(link))


def _open(path: Path) -> int:
    """Opens a lock file, which nothing else refers to: its content is replaced."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        with storage_errors(path):
            file = os.open(path, flags, 0o644)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise RecordError(_describe_link(path)) from None
        raise
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(file)
        raise RecordError(f"`{path}` is no file of this folder alone; remove it")
    return file


def _describe_link(path: Path) -> str:
    return (
        f"`{path}` is a link, and nothing is written through links; put what it points to in its "
        "place, or remove it"
    )


def is_locked(path: Path) -> bool:
    """Whether a living process holds the lock file."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
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
