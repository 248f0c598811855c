"""The run folder: created once, locked by one process, reopened for each further attempt."""

import errno
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, Self

from windlass.atomic_files import (
    atomic_write,
    becomes,
    hash_file,
    read_regular_file,
    storage_errors,
)
from windlass.document import Document
from windlass.errors import RecordError, shorten
from windlass.schema import CHECKPOINT_FOLDER, JOURNAL_FOLDER, RunState, Step
from windlass.tracking.environment import host_mark
from windlass.tracking.folder_lock import (
    ID_FILE,
    LOCK_FILE,
    OWN_NAMES,
    START_FILE,
    FolderLock,
    is_unfinished_start,
    remove_leftovers,
)
from windlass.tracking.journal import JournalEventName, JournalWriter
from windlass.tracking.step_records import append_step

MOST_ID_BYTES = 4096
RUN_FORMAT = 2
"""Version of the words in a run folder's files: keys of plan and request, names of instructions.
Folders of format 1 have no second line in their id file."""
_JOURNAL_NAME = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})(?:\+([0-9a-f]{8,64}))?\.j")
_MAX_NAME = 120
"""Characters of a name that become part of a folder's name."""
SHORT_ID_DIGITS = 6
"""Digits at the random end of an id that a person types to name a run."""


class RunFolder:
    """A run folder that this process has locked, with the journal of its attempt open.

    `create_run_folder` and `reopen_run_folder` make it. Close it, or use it as a context manager.
    """

    def __init__(self, path: Path, run_id: str, lock: FolderLock, rank: int = 0) -> None:
        self.path = path
        self.id = run_id
        self._lock = lock
        attempts = (file.attempt for file in journal_files(path) if file.rank == rank)
        self.attempt = 1 + max(attempts, default=0)
        self._journal = JournalWriter(journal_path(path, rank, self.attempt))
        self._held_out: float | None = None

    @property
    def short_id(self) -> str:
        """The last digits of the id, by which commands find the run."""
        return self.id[-SHORT_ID_DIGITS:]

    @property
    def journal(self) -> JournalWriter:
        """The journal of this attempt."""
        return self._journal

    def save(self, name: str, document: Document) -> None:
        """Writes one of the plain files atomically."""
        document.save(self.path / name)

    def seal(self, *names: str) -> None:
        """Notes in the journal what files contain now, so that a later change is noticed.

        Raises:
            RecordError: the folder was deleted or moved.
        """
        files = {name: hash_file(self.path / name) for name in names}
        self.append_event("seal", files=files, host=host_mark(self.id, files))

    def require_present(self) -> None:
        """Refuses to go on without the folder.

        Raises:
            RecordError: the folder was deleted or moved.
        """
        self._journal.require_present()

    def append_step(self, step: Step) -> None:
        """Appends one step to the journal; `journal.fault` says if the disk does not take it yet.

        Raises:
            RecordError: the folder was deleted or moved.
        """
        append_step(self._journal, step)
        if step.held_out_loss is not None:
            self._held_out = step.held_out_loss

    def append_event(self, name: JournalEventName, /, **fields: object) -> None:
        """Appends an event to the journal and waits until it is on the disk, if that takes it.

        Raises:
            RecordError: the folder was deleted or moved.
        """
        self._journal.append_event(name, fields)

    def end(self, state: RunState, **fields: object) -> None:
        """Appends the end of the run, with its last held-out loss, and unlocks the folder.

        Raises:
            RecordError: the folder was deleted or moved.
        """
        try:
            self.append_event("end", state=state, held_out_loss=self._held_out, **fields)
        finally:
            self.close()

    def close(self) -> None:
        """Closes the journal and unlocks the folder; without `end` the run counts as killed."""
        try:
            self._journal.close()
        finally:
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def create_run_folder(
    root: Path,
    name: str,
    *,
    documents: Mapping[str, Document],
    meta: Mapping[str, object],
    folder: Path | None = None,
    fill: Callable[[RunFolder], object] = lambda _: None,
) -> RunFolder:
    """Creates and locks a run folder `<date>-<name>-<end of id>` under `root`.

    It counts as a run once all is in it. Until then whoever is killed leaves a folder in which the
    next one starts over.

    Args:
        root: the folder that holds the runs; created if missing.
        name: the model's name; all but letters, digits, dots and dashes become dashes.
        documents: plain files by name (the constants of `schema.run_record`).
        meta: fields that lists and pages show without reading more files: `model`, `machine`,
            `steps`, `predicted_seconds`, `unigram_entropy` (nats a token) and others.
        folder: the run folder itself; None names one under `root`.
        fill: writes what else is in a folder before it counts as a run.

    Raises:
        RecordError: `folder` holds a run, runs, links or other files, or another process has locked
            it.
    """
    run_id = uuid7()
    path = folder or root / run_folder_name(name, run_id, time.time())
    require_no_other_content(path)
    with storage_errors(path):
        path.mkdir(parents=True, exist_ok=True)
    lock = FolderLock(path / LOCK_FILE)
    try:
        require_no_other_content(path)  # another process may have written it meanwhile
        remove_leftovers(path)
        with storage_errors(path):
            (path / START_FILE).touch()
        for file, document in documents.items():
            document.save(path / file)
        run = RunFolder(path, run_id, lock)
        run.append_event("meta", id=run_id, attempt=run.attempt, **meta)
        if documents:
            run.seal(*documents)
        fill(run)
        run.journal.flush()
        write_run_id(path, run_id)
        (path / START_FILE).unlink()
    except BaseException:
        lock.release()
        raise
    return run


def reopen_run_folder(folder: Path, *, meta: Mapping[str, object]) -> RunFolder:
    """Locks an existing run folder and opens its next attempt.

    Raises:
        RecordError: it holds no run, one of another format or links, or another process has locked
            it.
    """
    run_id = read_run_id(folder)
    lock = FolderLock(folder / LOCK_FILE)
    try:
        remove_leftovers(folder)
        run = RunFolder(folder, run_id, lock)
        run.append_event("meta", id=run_id, attempt=run.attempt, **meta)
        run.journal.flush()
    except BaseException:
        lock.release()
        raise
    return run


def run_folder_name(name: str, run_id: str, started: float) -> str:
    """The name of a run's folder, `<date>-<name>-<end of id>`.

    Args:
        name: any text; all but letters, digits, dots and dashes become dashes.
        started: seconds since 1970.
    """
    date = datetime.fromtimestamp(started, tz=UTC).strftime("%Y-%m-%d")
    safe_name = re.sub(r"[^A-Za-z0-9.]+", "-", name)[:_MAX_NAME].strip("-.") or "model"
    return f"{date}-{safe_name}-{run_id[-SHORT_ID_DIGITS:]}"


def write_run_id(folder: Path, run_id: str) -> None:
    """Writes the file that makes a folder a run."""
    atomic_write(folder / ID_FILE, f"{run_id}\nformat {RUN_FORMAT}\n")


def read_run_id(folder: Path) -> str:
    """The id of the run in `folder`.

    Raises:
        RecordError: it holds no run, or one of a format that this version does not read.
    """
    run_id, run_format = _read_id_file(folder)
    if run_format != RUN_FORMAT:
        raise RecordError(f"`{folder}` {_format_problem(run_format)}")
    return run_id


def read_run_format(folder: Path) -> int:
    """The format of the run in `folder`; `RUN_FORMAT` is the one that this version reads.

    Raises:
        RecordError: it holds no run.
    """
    return _read_id_file(folder)[1]


def _read_id_file(folder: Path) -> tuple[str, int]:
    """Id and format; an id file without a format is of format 1."""
    try:
        content = read_regular_file(folder / ID_FILE, most_bytes=MOST_ID_BYTES)
    except OSError as error:
        found = error.errno != errno.ENOENT and error.strerror
        reason = f"its file `{ID_FILE}` {found}" if found else f"it has no file `{ID_FILE}`"
        raise RecordError(f"`{shorten(str(folder))}` holds no run: {reason}") from None
    lines = content.decode(errors="replace").splitlines()
    run_format = re.fullmatch(r"format ([0-9]{1,9})", lines[1].strip()) if len(lines) > 1 else None
    return lines[0].strip() if lines else "", int(run_format[1]) if run_format else 1


def _format_problem(run_format: int) -> str:
    formats = f"(format {run_format}, this one reads {RUN_FORMAT})"
    if run_format > RUN_FORMAT:
        return f"was written by a newer Windlass {formats}; update Windlass to read it"
    return (
        f"was written by an older Windlass {formats}; start it anew, or read it with the version "
        "that wrote it"
    )


def journal_path(folder: Path, rank: int, attempt: int) -> Path:
    """Path of the journal of one rank and attempt; ranks count from 0, attempts from 1: `0.1.j`."""
    return folder / JOURNAL_FOLDER / f"{rank}.{attempt}.j"


@contextmanager
def rank_journal(folder: Path, rank: int, attempt: int) -> Iterator[JournalWriter]:
    """Opens the journal of a rank other than 0; the journal of rank 0 belongs to its `RunFolder`.

    Raises:
        RecordError: the journal exists already.
    """
    journal = JournalWriter(journal_path(folder, rank, attempt))
    try:
        yield journal
    finally:
        journal.close()


class JournalFile(NamedTuple):
    """One journal of a run folder."""

    rank: int
    attempt: int
    writer: str
    """`journal_writer_id`, where the run went on at two sites as this attempt; else empty."""
    path: Path


def journal_files(folder: Path) -> tuple[JournalFile, ...]:
    """The journals in a run folder, by rank, then by attempt."""
    try:
        names = [file.name for file in (folder / JOURNAL_FOLDER).iterdir()]
    except OSError:
        return ()
    matches = (_JOURNAL_NAME.fullmatch(name) for name in names)
    return tuple(
        sorted(
            JournalFile(int(m[1]), int(m[2]), m[3] or "", folder / JOURNAL_FOLDER / m[0])
            for m in matches
            if m
        )
    )


def require_no_other_content(path: Path) -> None:
    """Refuses a folder for a new run that holds anything else.

    What a start that failed has left of a run without an id is overwritten.

    Raises:
        RecordError: it holds a run, a folder of runs, or files of something else.
    """
    if (path / ID_FILE).exists():
        read_run_id(path)
        raise RecordError(f"`{path}` already holds a run; resume it, or train into another folder")
    try:
        names = sorted(entry.name for entry in path.iterdir())
    except OSError:  # missing, or no folder: making it says what is wrong
        return
    runs = [name for name in names if (path / name / ID_FILE).is_file()]
    if runs:
        raise RecordError(
            f"`{path}` holds {len(runs)} {'run' if len(runs) == 1 else 'runs'}, such as "
            f"`{runs[0]}`, and a run folder holds one run only; name a new folder, such as "
            f"`{path / 'NAME'}`"
        )
    own = OWN_NAMES | {ID_FILE, START_FILE}
    own |= {CHECKPOINT_FOLDER} if is_unfinished_start(path) else set()
    others = [name for name in names if (becomes(name) or name) not in own]
    if others:
        raise RecordError(
            f"`{path}` is not empty: it holds `{others[0]}`"
            f"{f' and {len(others) - 1} more' if len(others) > 1 else ''}; name a new or an empty "
            "folder for the run"
        )


def uuid7() -> str:
    """A new id; ids sort by the time of their creation, to a quarter of a microsecond.

    Source: RFC 9562, section 5.7, the 12 bits behind the millisecond as in section 6.2, method 3.
    """
    milliseconds, rest = divmod(time.time_ns(), 1_000_000)
    fraction = (rest << 12) // 1_000_000
    noise = int.from_bytes(os.urandom(8)) >> 2
    return str(uuid.UUID(int=milliseconds << 80 | 7 << 76 | fraction << 64 | 0b10 << 62 | noise))
