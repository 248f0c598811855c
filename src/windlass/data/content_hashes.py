"""Content hashes of a corpus's files, cached while a file's state on disk is unchanged.

Without the cache, each start on a corpus of 100 GB would read all of it only to learn that it is
unchanged.
"""

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from windlass.atomic_files import FileState, atomic_write, file_state, hash_file
from windlass.data.readers import SourceFile
from windlass.errors import DataError, StorageError

_MIN_AGE_NANOSECONDS = 2_000_000_000
"""Hashes of younger files are not cached: they may change again within one tick of the clock."""

DataProgress = Callable[[str, int, int | None], None]
"""Called with a label, the amount done, and the total (None if unknown)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HashedFile:
    """Content of one file when it was hashed."""

    name: str
    sha256: str
    state: FileState

    @property
    def nbytes(self) -> int:
        """Size of the file in bytes."""
        return self.state[0]


def hash_files(
    files: Sequence[SourceFile], cache: Path, progress: DataProgress
) -> tuple[HashedFile, ...]:
    """Hashes each file, or takes its hash from the cache.

    Args:
        cache: folder in which hashes are kept between calls.

    Raises:
        DataError: a file cannot be read.
    """
    first_paths = "\n".join(str(file.path.absolute()) for file in files[:1])
    cache_file = cache / f"hashes-{hashlib.sha256(first_paths.encode()).hexdigest()[:12]}.json"
    cached = _load_hashes(cache_file)
    hashed: list[HashedFile] = []
    cacheable: dict[str, tuple[FileState, str]] = {}
    now = time.time_ns()
    for number, file in enumerate(files):
        progress("checking files", number, len(files))
        path = str(file.path.absolute())
        try:
            state = file_state(file.path)
            earlier = cached.get(path)
            unchanged = earlier is not None and earlier[0] == state
            sha256 = earlier[1] if earlier and unchanged else hash_file(file.path)
        except OSError as error:
            raise DataError(f"`{file.path}` cannot be read: {error.strerror}") from None
        hashed.append(HashedFile(name=file.name, sha256=sha256, state=state))
        if now - max(state[1:3]) > _MIN_AGE_NANOSECONDS:
            cacheable[path] = (state, sha256)
    progress("checking files", len(files), len(files))
    if cacheable != cached:
        _save_hashes(cache_file, cacheable)
    return tuple(hashed)


def _load_hashes(cache_file: Path) -> dict[str, tuple[FileState, str]]:
    """Cached hashes by path; empty if the file is missing or damaged."""
    try:
        rows = json.loads(cache_file.read_text(encoding="utf-8"))
        return {
            path: ((int(size), int(modified), int(changed), int(inode)), str(sha256))
            for path, (size, modified, changed, inode, sha256) in rows.items()
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _save_hashes(cache_file: Path, hashes: dict[str, tuple[FileState, str]]) -> None:
    rows = {path: [*state, sha256] for path, (state, sha256) in hashes.items()}
    # A failure costs only time; preparing the tokens reports a full or read-only disk.
    with contextlib.suppress(StorageError, OSError):
        atomic_write(cache_file, json.dumps(rows))
