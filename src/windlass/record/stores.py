"""Stores of runs: what a merge reads from and writes to, on this disk and elsewhere."""

import contextlib
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from io import BufferedIOBase
from pathlib import Path
from typing import Protocol

from windlass.atomic_files import atomic_write, atomic_writer, hash_file
from windlass.errors import RecordError, is_text
from windlass.record.annotations import ANNOTATIONS_FOLDER
from windlass.schema import (
    ATTEMPTS_FOLDER,
    CHECKPOINT_FOLDER,
    JOURNAL_FOLDER,
)
from windlass.tracking import ID_FILE, LOCK_FILE, RUN_FORMAT, is_locked, read_run_format

JOURNAL_NAME = re.compile(rf"{JOURNAL_FOLDER}/([0-9]{{1,9}})\.([0-9]{{1,9}})(\+[0-9a-f]{{8}})?\.j")
"""Rank, attempt and, where two writers share them, the writer of a journal."""
_DOCUMENT = r"[A-Za-z0-9_]+(\.[a-z]+)*\.(toml|json|txt)(\+[0-9a-f]{8})?"
_RECORD_FILE = re.compile(
    rf"{JOURNAL_NAME.pattern}|{ANNOTATIONS_FOLDER}/[0-9a-f-]{{36}}\.json|{ID_FILE}"
    rf"|({ATTEMPTS_FOLDER}/[0-9]{{1,9}}/)?{_DOCUMENT}"
)
_CHECKPOINT_FILE = re.compile(
    rf"{CHECKPOINT_FOLDER}/step-[0-9]+/[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?"
)
"""A name that begins with a dot is that of a copy that a killed merge has begun."""
_RUN_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_LONGEST_NAME = 200
_CHUNK_BYTES = 2**24


def is_record_file(name: str, *, checkpoints: bool = False) -> bool:
    """Whether a file of a run folder belongs to the record, and may be copied to other stores.

    Locks, pages, offloaded state and checkpoints do not. A name that leaves the folder never does.

    Args:
        name: its path below the run folder, with `/`.
        checkpoints: count checkpoints too.
    """
    if len(name) > _LONGEST_NAME:
        return False
    return bool(_RECORD_FILE.fullmatch(name)) or (
        checkpoints and bool(_CHECKPOINT_FILE.fullmatch(name))
    )


def checkpoint_of(name: str) -> str | None:
    """The folder of the checkpoint that a file belongs to; None if it belongs to none."""
    return name.rpartition("/")[0] if _CHECKPOINT_FILE.fullmatch(name) else None


class Store(Protocol):
    """Files of runs by the id of their run and their path below the run folder."""

    @property
    def label(self) -> str:
        """What a message calls the store."""

    def runs(self) -> Mapping[str, str]:
        """The name of the folder of each run, by the run's id."""

    def add_run(self, run_id: str, folder: str) -> None:
        """Makes the folder of a run that is not there; it counts once its id file is written."""

    def files(self, run_id: str, *, checkpoints: bool = False) -> Mapping[str, int]:
        """Size in bytes of each file that belongs to the record, by name."""

    def read(self, run_id: str, name: str, length: int | None = None) -> bytes:
        """The content of a file, or its first `length` bytes."""

    def digest(self, run_id: str, name: str) -> str:
        """SHA-256 of the content of a file, in hexadecimal."""

    def write(self, run_id: str, name: str, content: bytes) -> None:
        """Puts a whole file there, or nothing."""

    def copy(self, run_id: str, name: str, file: Path) -> None:
        """Puts a copy of a large file there, or nothing, with a part of it in memory at most."""

    def is_busy(self, run_id: str) -> bool:
        """Whether a process is writing the run right now."""


class FolderStore:
    """A folder of run folders on this machine.

    Links, devices and names that no page could show are left out and told in `warnings`.

    Args:
        root: the folder; made when the first run is added.

    Raises:
        RecordError: it is a file, or a run in it is of a newer Windlass.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self.warnings: list[str] = []
        self._folders = dict(self._find_runs())

    @property
    def label(self) -> str:
        """The folder's path."""
        return str(self._root)

    def runs(self) -> Mapping[str, str]:
        """The name of the folder of each run, by the run's id."""
        return {run_id: folder.name for run_id, folder in self._folders.items()}

    def add_run(self, run_id: str, folder: str) -> None:
        """Chooses the folder of a new run; one of another run with this name is left alone."""
        path = self._root / folder
        if (path / ID_FILE).exists():  # another run has this name
            path = self._root / f"{folder}-{run_id}"
        self._folders[run_id] = path

    def files(self, run_id: str, *, checkpoints: bool = False) -> Mapping[str, int]:
        """Size in bytes of each file that belongs to the record, by name."""
        folder = self._folders[run_id]
        if not folder.is_dir():
            return {}
        sizes = {path.relative_to(folder).as_posix(): size for path, size in _regular_files(folder)}
        return {
            name: size
            for name, size in sizes.items()
            if is_record_file(name, checkpoints=checkpoints)
        }

    def read(self, run_id: str, name: str, length: int | None = None) -> bytes:
        """The content of a file, or its first `length` bytes.

        Raises:
            RecordError: it cannot be read, or is gone.
        """
        path = self.path(run_id, name)
        with read_errors(path), path.open("rb") as file:
            return file.read() if length is None else file.read(length)

    def digest(self, run_id: str, name: str) -> str:
        """SHA-256 of the content of a file, in hexadecimal.

        Raises:
            RecordError: it cannot be read, or is gone.
        """
        path = self.path(run_id, name)
        with read_errors(path):
            return hash_file(path)

    def write(self, run_id: str, name: str, content: bytes) -> None:
        """Puts a whole file there, or nothing.

        Raises:
            RecordError: no file of a record has this name.
            StorageError: the disk is full.
        """
        if not is_record_file(name, checkpoints=True):
            raise RecordError(f"`{name[:_LONGEST_NAME]}` is no file of a run's record")
        atomic_write(self._folders[run_id] / name, content)

    def copy(self, run_id: str, name: str, file: Path) -> None:
        """Puts a copy of a large file there, or nothing, with a part of it in memory at most.

        Raises:
            StorageError: the disk is full.
        """
        with file.open("rb") as content:
            self.write_from(run_id, name, content)

    def write_from(self, run_id: str, name: str, content: BufferedIOBase) -> None:
        """Puts what is left of an open file there, or nothing, as `copy` does.

        Raises:
            StorageError: the disk is full.
        """
        with atomic_writer(self.path(run_id, name)) as copy:
            shutil.copyfileobj(content, copy, _CHUNK_BYTES)

    def path(self, run_id: str, name: str) -> Path:
        """Where a file lies."""
        return self._folders[run_id] / name

    def is_busy(self, run_id: str) -> bool:
        """Whether a process on this host is writing the run right now."""
        return is_locked(self._folders[run_id] / LOCK_FILE)

    def _find_runs(self) -> Iterator[tuple[str, Path]]:
        if not self._root.exists():
            return
        if not self._root.is_dir():
            raise RecordError(f"`{self._root}` is no folder of runs")
        for folder in sorted(self._root.iterdir()):
            if folder.is_symlink() or not (folder / ID_FILE).is_file():
                continue
            if not is_text(folder.name):
                self.warnings.append(f"a folder in `{self._root}` has a name that is no text")
                continue
            if read_run_format(folder) > RUN_FORMAT:
                raise RecordError(
                    f"`{folder}` was written by a newer Windlass (format "
                    f"{read_run_format(folder)}, this one reads {RUN_FORMAT}); update Windlass"
                )
            run_id = (folder / ID_FILE).read_text(errors="replace").partition("\n")[0].strip()
            if _RUN_ID.fullmatch(run_id):
                yield run_id, folder
            else:
                self.warnings.append(f"`{folder}` has no readable id and was left out")


def require_run_id(run_id: str) -> None:
    """Refuses what is no run id, which could name a place elsewhere.

    Raises:
        RecordError: it is none.
    """
    if not _RUN_ID.fullmatch(run_id):
        raise RecordError(f"`{run_id[:_LONGEST_NAME]}` is no id of a run")


@contextlib.contextmanager
def read_errors(path: Path) -> Iterator[None]:
    """Turns a system error about a file that is read into a `RecordError`: a run may go on.

    Raises:
        RecordError: the file cannot be read, or is gone.
    """
    try:
        yield
    except OSError as error:
        reason = (error.strerror or "").lower()
        raise RecordError(f"`{path}` cannot be read any more: {reason}; merge again") from error


def _regular_files(folder: Path) -> Iterator[tuple[Path, int]]:
    """All regular files below a folder with their sizes; links are not followed.

    What a run that goes on removes meanwhile is left out.
    """
    with contextlib.suppress(FileNotFoundError):
        for path in sorted(folder.iterdir()):
            with contextlib.suppress(FileNotFoundError):
                status = path.lstat()
                if stat.S_ISDIR(status.st_mode):
                    yield from _regular_files(path)
                elif stat.S_ISREG(status.st_mode):
                    yield path, status.st_size
