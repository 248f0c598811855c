"""Content hashes of a corpus's files, remembered while a file's state on disk is unchanged.

Without this, each start on a corpus of 100 GB would read it whole only to learn that it is the
same.
"""

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from windlass.atomic_files import hash_file, atomic_write
from windlass.data.readers import SourceFile
from windlass.errors import DataError, StorageError

_SETTLED_NANOSECONDS = 2_000_000_000
"""A file younger than this may change again within its clock tick, so it is not remembered."""

FileState = tuple[int, int, int, int]
DataProgress = Callable[[str, int, int | None], None]
"""Told a label, what is done, and of how much (None where that is not known)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HashedFile:
    """What one file held when it was hashed."""

    name: str
    sha256: str
    state: FileState
    """Size in bytes, times of change of content and of entry in nanoseconds, file number."""

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return self.state[0]


def hash_files(files: Sequence[SourceFile], cache: Path, progress: DataProgress) -> tuple[HashedFile, ...]:
    """The content of each file.

    Args:
        files: of one corpus.
        memory: folder in which hashes are kept between calls.
        progress: told "checking files" and their number.

    Raises:
        DataError: a file cannot be read.
    """
    spelled = "\n".join(str(file.path.absolute()) for file in files[:1])
    kept = cache / f"hashes-{hashlib.sha256(spelled.encode()).hexdigest()[:12]}.json"
    known = _remembered(kept)
    found: list[HashedFile] = []
    settled: dict[str, tuple[FileState, str]] = {}
    now = time.time_ns()
    for number, file in enumerate(files):
        progress("checking files", number, len(files))
        path = str(file.path.absolute())
        try:
            state = file_state(file.path)
            earlier = known.get(path)
            unchanged = earlier is not None and earlier[0] == state
            sha256 = earlier[1] if earlier and unchanged else hash_file(file.path)
        except OSError as error:
            raise DataError(f"`{file.path}` cannot be read: {error.strerror}") from None
        found.append(HashedFile(name=file.name, sha256=sha256, state=state))
        if now - max(state[1:3]) > _SETTLED_NANOSECONDS:
            settled[path] = (state, sha256)
    if settled != known:
        _remember(kept, settled)
    return tuple(found)


def file_state(path: Path) -> FileState:
    """What changes on disk whenever a file's content does."""
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


def _remembered(kept: Path) -> dict[str, tuple[FileState, str]]:
    """Earlier hashes; a missing or damaged file is no memory."""
    try:
        rows = json.loads(kept.read_text(encoding="utf-8"))
        return {
            path: ((int(size), int(changed), int(entered), int(number)), str(sha256))
            for path, (size, changed, entered, number, sha256) in rows.items()
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _remember(kept: Path, settled: dict[str, tuple[FileState, str]]) -> None:
    rows = {path: [*state, sha256] for path, (state, sha256) in settled.items()}
    # Only time is lost where this cannot be written; the tokens themselves will say so.
    with contextlib.suppress(StorageError, OSError):
        atomic_write(kept, json.dumps(rows))
