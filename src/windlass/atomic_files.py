"""Files written whole or not at all: write beside, flush to the disk, rename over.

A reader therefore sees the old file or the new one, never half of either, also after `kill -9` or
a power cut.
"""

import contextlib
import errno
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from platformdirs import user_cache_path

from windlass.errors import StorageError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REFUSED = (
    errno.EACCES, errno.EROFS, errno.EPERM,
    errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG,
)  # fmt: skip
"""Closed to us, or a file where a folder should be, or the other way round."""


def cache_folder() -> Path:
    """Where what can be made again is kept for this user: graphs, tokens, measurements."""
    return user_cache_path("windlass")


def atomic_write(path: Path, content: bytes | str) -> None:
    """Writes `content` to `path` whole or not at all.

    Raises:
        StorageError: the disk is full, or the folder does not take the file.
    """
    with atomic_writer(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def atomic_writer(path: Path) -> Iterator[BinaryIO]:
    """A file that appears under `path` when the block ends well, and not at all otherwise.

    Raises:
        StorageError: the disk is full, or the folder does not take the file.
    """
    require_writable(path)
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    with storage_errors(path):
        try:
            with _created(beside) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
            fsync_folder(path.parent)
        finally:
            beside.unlink(missing_ok=True)


def _created(path: Path) -> BinaryIO:
    """A new file, with the folders above it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("xb")
    except FileNotFoundError as error:  # on no disk, such as in `/proc`
        raise PermissionError(errno.EPERM, "no file can be made there") from error


def require_writable(path: Path) -> None:
    """Refuses a place that takes no file, as far as can be told without writing.

    For verbs that work long before they write. A rename would put a file in the place of a device
    such as `/dev/full`, or of a pipe.

    Raises:
        StorageError: why it takes none.
    """
    with storage_errors(path):
        above = path.absolute().parents
        there = next(folder for folder in above if folder.exists())
        if not there.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "not a directory")
        if not os.access(there, os.W_OK):
            raise PermissionError(errno.EACCES, "permission denied")
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "is a directory")
        if path.exists() and not path.is_file():
            raise FileExistsError(errno.EEXIST, "is no plain file")


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turns the system's word for a full or closed disk into a `StorageError` that names `path`.

    Raises:
        StorageError: the disk is full, or the folder does not take the file.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StorageError(
                f"no space left to write `{path}`; free some, or name another folder"
            ) from error
        if error.errno in _REFUSED:
            raise StorageError(
                f"`{path}` cannot be written: {(error.strerror or '').lower()}; name another place"
            ) from error
        raise


def fsync_folder(folder: Path) -> None:
    """Makes a rename inside `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def free_disk_bytes(path: Path) -> int:
    """Room on the disk under a path that may not be there yet."""
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    return shutil.disk_usage(there).free


def hash_file(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
