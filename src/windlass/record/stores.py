"""Stores of runs: what a merge reads from and writes to, on this disk and elsewhere."""

import contextlib
import hashlib
import re
import shutil
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from io import BufferedIOBase
from pathlib import Path
from typing import Protocol

from windlass.atomic_files import (
    atomic_write,
    atomic_writer,
    hash_file,
    read_regular_file,
)
from windlass.errors import RecordError, is_text
from windlass.record.annotations import ANNOTATIONS_FOLDER
from windlass.schema import (
    ATTEMPTS_FOLDER,
    CHECKPOINT_FOLDER,
    JOURNAL_FOLDER,
)
from windlass.tracking import (
    ID_FILE,
    LOCK_FILE,
    MOST_ID_BYTES,
    RUN_FORMAT,
    is_locked,
    journal_writer_id,
    read_run_format,
)

JOURNAL_NAME = re.compile(
    rf"{JOURNAL_FOLDER}/([0-9]{{1,9}})\.([0-9]{{1,9}})(\+[0-9a-f]{{8,64}})?\.j"
)
"""Rank, attempt and, where two writers share them, the writer of a journal."""
_DOCUMENT = r"[A-Za-z0-9_]+(\.[a-z]+)*\.(toml|json|txt)(\+[0-9a-f]{8,64})?"
_RECORD_FILE = re.compile(
    rf"{JOURNAL_NAME.pattern}|{ANNOTATIONS_FOLDER}/[0-9a-f-]{{36}}\.json|{ID_FILE}"
    rf"|({ATTEMPTS_FOLDER}/[0-9]{{1,9}}/)?{_DOCUMENT}"
)
_CHECKPOINT_FILE = re.compile(
    rf"{CHECKPOINT_FOLDER}/step-[0-9]+/[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?"
)
"""A name that begins with a dot is that of a copy that a killed merge has begun."""
_RUN_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_HASH_DIGITS = (8, 16, 64)
"""Digits of a hash in a name: more of them only where another file has the shorter name."""
_LONGEST_NAME = 200
_CHUNK_BYTES = 2**24
_MOST_BYTES, _MOST_JOURNAL_BYTES = 2**28, 2**31
"""Most bytes of a document and of a journal that are copied; a run writes a few mebibytes."""
_MOST_DEPTH = 3
"""Names in the longest path of a file of a record below its run folder."""


def is_record_file(name: str, *, checkpoints: bool = False) -> bool:
    """Whether a file of a run folder belongs to the record, and may be copied to other stores.

    Locks, pages, offloaded state and checkpoints do not. A name that leaves the folder never does.

    Args:
        name: its path below the run folder, with `/`.
    """
    if len(name) > _LONGEST_NAME:
        return False
    return bool(_RECORD_FILE.fullmatch(name)) or (
        checkpoints and bool(_CHECKPOINT_FILE.fullmatch(name))
    )


class RunNotCopiedError(RecordError):
    """One run cannot be copied now; the others can."""


def size_problem(name: str, size: int) -> str | None:
    """Why a file is too large to be copied, half a sentence; None if it is not.

    Checkpoints are copied part by part, and may have any size.
    """
    if checkpoint_of(name):
        return None
    most = _MOST_JOURNAL_BYTES if JOURNAL_NAME.fullmatch(name) else _MOST_BYTES
    return f"has {size} bytes, more than {most}, and is left out" if size > most else None


def checkpoint_of(name: str) -> str | None:
    """The folder of the checkpoint that a file belongs to; None if it belongs to none."""
    return name.rpartition("/")[0] if _CHECKPOINT_FILE.fullmatch(name) else None


def is_document(name: str) -> bool:
    """Whether a file is a document, of which variants may be kept beside it."""
    return bool(re.fullmatch(rf"({ATTEMPTS_FOLDER}/[0-9]{{1,9}}/)?{_DOCUMENT}", name))


def is_annotation(name: str) -> bool:
    """Whether a file holds a change of tags or notes."""
    return name.startswith(f"{ANNOTATIONS_FOLDER}/")


def journal_copies(name: str, present: Iterable[str]) -> list[str]:
    """The journals of the same rank and attempt, the one of the first writer first."""
    wanted = JOURNAL_NAME.fullmatch(name)
    if wanted is None:
        return []
    matches = filter(None, map(JOURNAL_NAME.fullmatch, sorted(present)))
    copies = [match for match in matches if match.group(1, 2) == wanted.group(1, 2)]
    return [match[0] for match in sorted(copies, key=lambda match: match[3] or "")]


def free_journal_name(name: str, content: bytes, present: Collection[str]) -> str:
    """A name for the journal of another writer, beside those of its rank and attempt."""
    rank_attempt = name.removesuffix(".j").partition("+")[0]
    writer = journal_writer_id(content) or hashlib.sha256(content).hexdigest()
    names = (f"{rank_attempt}.j", *(f"{rank_attempt}+{writer[:n]}.j" for n in _HASH_DIGITS))
    return _first_free(names, present)


def kept_name(store: "Store", run_id: str, name: str, digest: str) -> tuple[str, bool]:
    """Under which name a variant of a document is kept beside it, and whether it is there.

    Args:
        store: where.
        digest: SHA-256 of the variant, in hexadecimal.

    Raises:
        RecordError: other files have all its names.
    """
    present = store.files(run_id)
    names = [f"{name}+{digest[:digits]}" for digits in _HASH_DIGITS]
    kept = (known for known in names if known in present and store.digest(run_id, known) == digest)
    known = next(kept, None)
    return (known, True) if known else (_first_free(names, present), False)


def _first_free(names: Iterable[str], present: Collection[str]) -> str:
    free = next((name for name in names if name not in present), None)
    if free is None:
        raise RecordError("other files have all names that this one could have")
    return free


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

    Links, devices and names that no page could show are left out, as are runs whose id cannot be
    read; `warnings` tells of them.

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
        # Another run has this name, or will have it when its id file comes.
        if (path / ID_FILE).exists() or path in self._folders.values():
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
        """
        if not is_record_file(name, checkpoints=True):
            raise RecordError(f"`{name[:_LONGEST_NAME]}` is no file of a run's record")
        atomic_write(self._written_path(run_id, name), content)

    def copy(self, run_id: str, name: str, file: Path) -> None:
        """Puts a copy of a large file there, or nothing, with a part of it in memory at most."""
        with file.open("rb") as content:
            self.write_from(run_id, name, content)

    def write_from(self, run_id: str, name: str, content: BufferedIOBase) -> None:
        """Puts what is left of an open file there, or nothing, as `copy` does."""
        with atomic_writer(self._written_path(run_id, name)) as copy:
            shutil.copyfileobj(content, copy, _CHUNK_BYTES)

    def path(self, run_id: str, name: str) -> Path:
        """Where a file lies."""
        return self._folders[run_id] / name

    def _written_path(self, run_id: str, name: str) -> Path:
        """Where a file is written; not through a link, which may lead to other files."""
        folder = self._folders[run_id]
        for place in (folder, *(folder / part for part in Path(name).parents)):
            if place.is_symlink():
                raise RunNotCopiedError(
                    f"`{place}` is a link, and nothing is written through links; put what it "
                    "points to in its place"
                )
        return folder / name

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
            try:
                run_format = read_run_format(folder)
                content = read_regular_file(folder / ID_FILE, most_bytes=MOST_ID_BYTES)
            except (OSError, RecordError) as error:
                self.warnings.append(f"a run was left out: {error}")
                continue
            if run_format > RUN_FORMAT:
                raise RecordError(
                    f"`{folder}` was written by a newer Windlass (format {run_format}, this one "
                    f"reads {RUN_FORMAT}); update Windlass"
                )
            run_id = content.decode(errors="replace").partition("\n")[0].strip()
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
    """Turns a system error about a file that is read into a sentence: a run may go on.

    Raises:
        RunNotCopiedError: the file cannot be read, or is gone.
    """
    try:
        yield
    except OSError as error:
        reason = (error.strerror or "").lower()
        raise RunNotCopiedError(
            f"`{path}` cannot be read any more: {reason}; merge again"
        ) from error


def _regular_files(folder: Path, depth: int = _MOST_DEPTH) -> Iterator[tuple[Path, int]]:
    """All regular files below a folder with their sizes; links are not followed.

    What a run that goes on removes meanwhile is left out, and what lies too deep for a record.
    """
    with contextlib.suppress(FileNotFoundError):
        for path in sorted(folder.iterdir()):
            with contextlib.suppress(FileNotFoundError):
                status = path.lstat()
                if stat.S_ISDIR(status.st_mode):
                    yield from _regular_files(path, depth - 1) if depth > 1 else ()
                elif stat.S_ISREG(status.st_mode):
                    yield path, status.st_size
