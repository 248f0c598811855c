"""The run folder: made once, held by one process, opened again as the next attempt."""

import os
import re
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from windlass.atomic_files import storage_errors
from windlass.document import Document
from windlass.errors import RecordError
from windlass.schema.run_record import JOURNAL_FOLDER, RunState, Step
from windlass.tracking.folder_lock import FolderLock
from windlass.tracking.journal import JournalEventName, JournalWriter
from windlass.tracking.step_records import append_step

LOCK_FILE = ".lock"
ID_FILE = "id"
SHORT_DIGITS = 6
"""Of the id's random end: what a person types."""


class RunFolder:
    """A run folder that this process holds, with the journal of its attempt open.

    Made by `create` and `reopen`. Close it, or use it as a context.
    """

    def __init__(self, path: Path, run_id: str, lock: FolderLock, rank: int = 0) -> None:
        self.path = path
        self.id = run_id
        self._lock = lock
        self.attempt = 1 + max((a for r, a in journal_files(path) if r == rank), default=0)
        self._journal = JournalWriter(journal_path(path, rank, self.attempt))
        self._held_out: float | None = None

    def save(self, name: str, document: Document) -> None:
        """Writes one of the plain files, whole or not at all.

        Raises:
            StorageError: the disk is full or closed.
        """
        document.save(self.path / name)

    def append_step(self, step: Step) -> None:
        """Journals one step.

        Raises:
            StorageError: the disk is full.
        """
        append_step(self._journal, step)
        if step.held_out_loss is not None:
            self._held_out = step.held_out_loss

    def append_event(self, name: JournalEventName, **fields: object) -> None:
        """Journals an event and waits until it is on the disk.

        Raises:
            StorageError: the disk is full.
        """
        self._journal.append_event(name, fields)

    def end(self, state: RunState, **fields: object) -> None:
        """Journals how the run ended, with its last held-out loss for lists, and frees the folder.

        Raises:
            StorageError: the disk is full.
        """
        try:
            self.append_event("end", state=state, held_out_loss=self._held_out, **fields)
        finally:
            self.close()

    def close(self) -> None:
        """Closes the journal and frees the folder; without `end` the run counts as killed."""
        try:
            self._journal.close()
        finally:
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def create_run_folder(
    root: Path,
    name: str,
    *,
    documents: Mapping[str, Document],
    meta: Mapping[str, object],
    folder: Path | None = None,
) -> RunFolder:
    """A new run folder `<date>-<name>-<end of id>` under `root`, held by this process.

    Args:
        root: where runs lie; made if missing.
        name: the model's; what is no letter, digit, dot or dash becomes a dash.
        documents: plain files by name (the constants of `spec.record`).
        meta: what lists and pages show without reading more: `model`, `machine`, `steps`,
            `predicted_seconds`, `unigram_entropy` (nats a token), whatever else is worth it.
        folder: takes this folder in place of a name under `root`.

    Raises:
        RecordError: `folder` holds a run already, or another process holds it.
        StorageError: the disk is full or closed.
    """
    run_id = uuid7()
    date = datetime.now(tz=UTC).strftime("%Y-%m-%d")
    plain = re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-.") or "model"
    path = folder or root / f"{date}-{plain}-{run_id[-SHORT_DIGITS:]}"
    with storage_errors(path):
        path.mkdir(parents=True, exist_ok=True)
    lock = FolderLock(path / LOCK_FILE)
    try:
        _refuse_second_run(path)
        for file, document in documents.items():
            document.save(path / file)
        with storage_errors(path):
            (path / ID_FILE).write_text(run_id + "\n", encoding="utf-8")
        run = RunFolder(path, run_id, lock)
        run.append_event("meta", id=run_id, attempt=run.attempt, **meta)
    except BaseException:
        lock.release()
        raise
    return run


def reopen_run_folder(folder: Path, *, meta: Mapping[str, object]) -> RunFolder:
    """An existing run folder as its next attempt, held by this process.

    Raises:
        RecordError: it holds no run, or another process holds it.
        StorageError: the disk is full or closed.
    """
    run_id = read_run_id(folder)
    lock = FolderLock(folder / LOCK_FILE)
    try:
        run = RunFolder(folder, run_id, lock)
        run.append_event("meta", id=run_id, attempt=run.attempt, **meta)
    except BaseException:
        lock.release()
        raise
    return run


def read_run_id(folder: Path) -> str:
    """The id of the run in `folder`.

    Raises:
        RecordError: it holds no run.
    """
    try:
        return (folder / ID_FILE).read_text(encoding="utf-8").strip()
    except OSError:
        raise RecordError(f"`{folder}` holds no run: it has no file `{ID_FILE}`") from None


def journal_path(folder: Path, rank: int, attempt: int) -> Path:
    """Where one rank journals one attempt; both count as the file name says: `0.1.j` is first."""
    return folder / JOURNAL_FOLDER / f"{rank}.{attempt}.j"


@contextmanager
def rank_journal(folder: Path, rank: int, attempt: int) -> Iterator[JournalWriter]:
    """The journal of another rank's attempt at a run; the run's own is rank 0's.

    Raises:
        RecordError: it was written before.
        StorageError: the disk is full.
    """
    journal = JournalWriter(journal_path(folder, rank, attempt))
    try:
        yield journal
    finally:
        journal.close()


def journal_files(folder: Path) -> tuple[tuple[int, int], ...]:
    """Rank and attempt of each journal, sorted."""
    try:
        names = [file.name for file in (folder / JOURNAL_FOLDER).iterdir()]
    except OSError:
        return ()
    matches = (re.fullmatch(r"([0-9]+)\.([0-9]+)\.j", name) for name in names)
    return tuple(sorted((int(m.group(1)), int(m.group(2))) for m in matches if m))


def _refuse_second_run(path: Path) -> None:
    if (path / ID_FILE).exists():
        raise RecordError(f"`{path}` holds a run already; resume it, or train into another folder")


def uuid7() -> str:
    """A new id whose order is that of its making, to a quarter of a microsecond.

    Source: RFC 9562, section 5.7, the 12 bits behind the millisecond as in section 6.2, method 3.
    """
    milliseconds, rest = divmod(time.time_ns(), 1_000_000)
    fraction = (rest << 12) // 1_000_000
    noise = int.from_bytes(os.urandom(8)) >> 2
    return str(uuid.UUID(int=milliseconds << 80 | 7 << 76 | fraction << 64 | 0b10 << 62 | noise))
