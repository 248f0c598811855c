"""Atomic writes: makes a temporary file or folder, flushes it to the disk, and renames it.

A reader therefore sees the old file or the new one, never a part of either, even after `kill -9` or
a power cut. Files that a user names are read only if they are regular and of bounded size.
"""

import contextlib
import errno
import fcntl
import glob
import hashlib
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator
from functools import cache
from io import BufferedReader
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

from platformdirs import user_cache_path, user_data_path

from windlass.errors import StorageError

FileState = tuple[int, int, int, int]
"""Size in bytes, modification and status change times in nanoseconds, inode number."""

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOT_WRITABLE = (
    errno.EACCES, errno.EROFS, errno.EPERM,
    errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG,
)  # fmt: skip
"""No permission, or a file where a folder should be, or the other way round."""
_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS)
"""Another file system, one without hard links, or one file with too many of them."""
_COPIED_BYTES = 2**24
_MOST_BYTES = 2**28
"""Largest file of settings, graphs or records that is read whole."""
_SEAL = b"# sha256 of the lines below: "
_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{8}\.tmp")
"""Name of a temporary file, with that of the file that it becomes."""
_SCRATCH, _HELD = ".scratch-", "held"
"""Beginning of the names of scratch folders, and the file in each that its process holds."""


def cache_folder() -> Path:
    """The user's cache folder for graphs, tokens and measurements, which can all be recreated."""
    return user_cache_path("windlass")


def data_folder() -> Path:
    """The user's folder for what cannot be recreated, such as measurements of other machines."""
    return user_data_path("windlass")


def atomic_write(path: Path, content: bytes | str) -> None:
    """Writes `content` to `path` completely or not at all."""
    with atomic_writer(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def atomic_writer(path: Path) -> Iterator[BinaryIO]:
    """A file that appears at `path` if the block ends without an exception, and not otherwise."""
    require_writable(path)
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        yield file


@contextlib.contextmanager
def atomic_path(path: Path, *, clears: bool = False) -> Iterator[Path]:
    """An empty file that appears at `path` if the block ends without an exception, else nothing.

    Args:
        path: the file, which is replaced.
        clears: removes what killed processes have left of it, which may be large.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    with storage_errors(path):
        for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.tmp") if clears else ():
            _remove_unless_held(leftover, leftover)
        try:
            with _create(temporary) as file:
                _hold(file)
                yield temporary
                os.fsync(file.fileno())
            # Who waits for the file may rename its folder as soon as it appears.
            with _open_folder(path.parent) as folder:
                temporary.replace(path)
                os.fsync(folder)
        finally:
            temporary.unlink(missing_ok=True)


def becomes(temporary: str) -> str | None:
    """The name of the file that a temporary one of this module becomes; None if it is another."""
    match = _TEMPORARY.fullmatch(temporary)
    return match and match[1]


def remove_temporary_files(folder: Path) -> None:
    """Removes what killed processes have left of files that they wrote into a folder."""
    with contextlib.suppress(OSError):
        for entry in [*os.scandir(folder)]:
            if becomes(entry.name) is not None and entry.is_file(follow_symlinks=False):
                _remove_unless_held(Path(entry.path), Path(entry.path))


def _create(path: Path) -> BinaryIO:
    """A new file; missing parent folders are created."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("xb")
    except FileNotFoundError as error:  # not on a disk, such as in `/proc`
        raise PermissionError(errno.EPERM, "no file can be created there") from error


@contextlib.contextmanager
def atomic_folder(path: Path, *, replaces: bool = False) -> Iterator[Path]:
    """A new folder that appears at `path` if the block ends without an exception, else nothing.

    Args:
        path: the folder, which is missing or empty.
        replaces: removes what is there, and what killed processes have left beside it; so one
            process at a time.
    """
    for leftover in path.parent.glob(f".{path.name}.*.tmp") if replaces else ():
        shutil.rmtree(leftover, ignore_errors=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    with storage_errors(path):
        try:
            temporary.mkdir(parents=True)
            yield temporary
            if replaces and path.exists():
                shutil.rmtree(path)
            temporary.replace(path)
            fsync_folder(path.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def require_writable(path: Path) -> None:
    """Refuses a path that cannot be written, as far as can be checked without writing.

    Commands that work for long before they write check this first. Paths of devices such as
    `/dev/full` and of pipes are refused too, because a rename would replace them.
    """
    with storage_errors(path):
        existing = next(folder for folder in path.absolute().parents if folder.exists())
        if not existing.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "not a directory")
        if not os.access(existing, os.W_OK):
            raise PermissionError(errno.EACCES, "permission denied")
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "is a directory")
        if path.exists() and not path.is_file():
            raise FileExistsError(errno.EEXIST, "is not a regular file")


def require_output_file(path: Path) -> None:
    """Refuses a file that a user wants written where there is no such folder, or none can be."""
    if not path.parent.is_dir():
        raise StorageError(
            f"there is no folder `{path.parent}` for `{path.name}`; make it, or name another one"
        )
    require_writable(path)


@contextlib.contextmanager
def scratch_folder(beside: Path) -> Iterator[Path]:
    """A folder for large files that are read once, while the context is open.

    It is made in another folder, whose disk held such files before; where that cannot be written
    to, as the runs of somebody else, it is among the system's temporary ones. Those that killed
    processes have left there are removed.
    """
    for leftover in beside.glob(f"{_SCRATCH}*"):
        _remove_unless_held(leftover, leftover / _HELD)
    try:
        made = TemporaryDirectory(prefix=_SCRATCH, dir=beside)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        made = TemporaryDirectory(prefix=_SCRATCH)
    with made as name, (folder := Path(name)).joinpath("new").open("xb") as held:
        _hold(held)
        (folder / "new").rename(folder / _HELD)  # so that it is never there without being held
        yield folder


def _hold(file: BinaryIO) -> None:
    """Locks a file as long as it is open, where the file system has locks."""
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX)


def _remove_unless_held(leftover: Path, held: Path) -> None:
    """Removes a temporary file or folder whose process has died, and so locks no file of it.

    What cannot be locked or removed stays.
    """
    with contextlib.suppress(OSError), held.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turns a system error of a full or unwritable disk into a `StorageError` that names `path`."""
    try:
        yield
    except OSError as error:
        if error.errno in _DISK_FULL:
            raise StorageError(
                f"no space left to write `{path}`; free some, or name another folder"
            ) from error
        if error.errno in _NOT_WRITABLE:
            raise StorageError(
                f"`{path}` cannot be written: {(error.strerror or '').lower()}; name another place"
            ) from error
        raise


@contextlib.contextmanager
def one_process(lock: Path, on_wait: Callable[[], object]) -> Iterator[None]:
    """Lets one process at a time into the block; a process that dies leaves it.

    Args:
        lock: a file for it, which stays there and says nothing.
        on_wait: called once if another process is in the block.
    """
    with storage_errors(lock):
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("ab")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def link_or_copy(file: Path, to: Path) -> bool:
    """Gives a file a second name, and returns True; where the file system has no links, copies it.

    Raises:
        OSError: the disk is full, or `to` exists.
    """
    try:
        os.link(file, to)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
    else:
        return True
    with file.open("rb") as source, to.open("xb") as copy:
        shutil.copyfileobj(source, copy, _COPIED_BYTES)
        copy.flush()
        os.fsync(copy.fileno())
    return False


def fsync_folder(folder: Path) -> None:
    """Flushes a folder to the disk, so that a rename inside it survives a power cut."""
    with _open_folder(folder) as handle:
        os.fsync(handle)


@contextlib.contextmanager
def _open_folder(folder: Path) -> Iterator[int]:
    """A handle of a folder, which stays that of the folder under any name."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        yield handle
    finally:
        os.close(handle)


def free_disk_bytes(path: Path) -> int:
    """Free bytes on the disk of a path that may not exist yet."""
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    return shutil.disk_usage(existing).free


def open_regular_file(path: Path) -> BufferedReader:
    """A file that a user names, opened to be read.

    Pipes and devices such as `/dev/zero` are refused before they are opened: they may never end.

    Raises:
        OSError: the file is missing or not a regular one; `strerror` says which.
    """
    try:
        status = path.stat()
    except ValueError:  # a NUL character, or one that is no UTF-8
        raise FileNotFoundError(errno.ENOENT, "no file can have this name") from None
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, "is a folder")
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "is not a regular file")
    return path.open("rb")


def read_regular_file(path: Path, *, most_bytes: int = _MOST_BYTES) -> bytes:
    """The content of a file that a user names.

    Raises:
        OSError: the file is missing, not a regular one, or larger than `most_bytes`; `strerror`
            says which.
    """
    with open_regular_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise OSError(errno.EFBIG, f"has {size} bytes, more than {most_bytes}")
        return file.read()


def hash_file(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal.

    Raises:
        OSError: the file is missing or not a regular one; `strerror` says which.
    """
    with open_regular_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@cache
def source_digest(*packages: str) -> str:
    """SHA-256, in hexadecimal, of all code and data files of some packages of Windlass.

    It is read once in a process, whose code does not change when files do.
    """
    digest = hashlib.sha256()
    for package in packages:
        files = (Path(__file__).parent / package).rglob("*.*")
        for path in sorted(path for path in files if path.suffix in (".py", ".toml")):
            digest.update(path.name.encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def file_state(path: Path) -> FileState:
    """Properties that change on disk whenever a file's content does.

    Raises:
        OSError: there is no such file.
    """
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


def seal(content: bytes) -> bytes:
    """The content with its own SHA-256 above it, as a comment line.

    A seal detects damage and edits by hand. It is no signature: whoever edits a file can also seal
    it anew.
    """
    return _SEAL + hashlib.sha256(content).hexdigest().encode() + b"\n" + content


def unseal(sealed: bytes) -> bytes | None:
    """The content that `seal` was given, or that was never sealed; None if it has changed since."""
    if not sealed.startswith(_SEAL):
        return sealed
    content = sealed.partition(b"\n")[2]
    return content if seal(content) == sealed else None
