"""Builds our C++ code against torch, once, into the user's cache.

A library's file is named after the hash of its source, torch's version, the compiler's flags and
the processor's features, followed by the hash of its own content: a damaged one is built anew.
"""

import contextlib
import fcntl
import hashlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

from windlass.atomic_files import cache_folder, hash_file, storage_errors
from windlass.errors import MachineError, shorten

BuildProgress = Callable[[str, int, int | None], None]
"""Called with what is done, how far it is, and the end if it is known."""

_HASH_DIGITS = 16
_COMPILERS = ("c++", "g++", "clang++")
_TIMEOUT_SECONDS = 120.0
"""Our largest file takes about 5 s on one core."""
_QUIET_SECONDS = 2.0
"""Builds that take longer report it."""


def build_native_library(
    source: Path,
    *,
    flags: Sequence[str] = (),
    timeout_seconds: float = _TIMEOUT_SECONDS,
    progress: BuildProgress | None = None,
) -> Path:
    """The library of a C++ file in the user's cache, built if it is not there yet.

    If several ranks need it at once, one builds; the others wait and share the result, also
    if that is a failure.

    Args:
        flags: of the compiler, after those that every library needs.
        timeout_seconds: time after which a compiler is ended.
        progress: called once if the build takes longer than 2 s.

    Raises:
        MachineError: there is no compiler, it fails or it hangs, or this is not Linux.
        StorageError: the cache cannot be written.
    """
    if not sys.platform.startswith("linux"):
        raise MachineError(f"`{source.name}` is built on Linux only")
    folder, name = cache_folder(), f"{source.stem}-{_key(source, flags)}"
    library = _find(folder, name)
    if library is not None:
        return library
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with _build_lock(folder / f".{name}.lock") as (lock, failure):
            library = _find(folder, name)
            if library is not None:
                return library
            if failure:
                raise MachineError(failure)
            temporary = folder / f".{name}.{os.getpid()}.so"
            try:
                _compile(source, temporary, flags, timeout_seconds, progress)
                return temporary.replace(_path(folder, name, temporary))
            except MachineError as error:
                lock.write(str(error))
                raise
            finally:
                temporary.unlink(missing_ok=True)


def _find(folder: Path, name: str) -> Path | None:
    """The library in the cache; damaged ones are removed."""
    for library in folder.glob(f"{name}-*.so"):
        if library == _path(folder, name, library):
            return library
        with contextlib.suppress(OSError):  # a cache that cannot be written
            library.unlink(missing_ok=True)
    return None


def _path(folder: Path, name: str, library: Path) -> Path:
    return folder / f"{name}-{hash_file(library)[:_HASH_DIGITS]}.so"


def _key(source: Path, flags: Sequence[str]) -> str:
    features = _processor_features() if "-march=native" in flags else platform.machine()
    words = (version("torch"), features, *flags)
    text = source.read_bytes()
    digest = hashlib.sha256(text)
    for name in re.findall(rb'^#include "(\S+)"', text, re.MULTILINE):
        digest.update(source.with_name(name.decode()).read_bytes())
    for word in words:
        digest.update(b"\0" + word.encode())
    return digest.hexdigest()[:_HASH_DIGITS]


def _processor_features() -> str:
    """The instruction sets that this processor has, as the system lists them."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


@contextlib.contextmanager
def _build_lock(path: Path) -> Iterator[tuple[TextIO, str]]:
    """Holds the lock of a build.

    Yields:
        The lock's file, empty, in which a build notes how it failed; and how another process failed
        while this one waited, or an empty text.
    """
    asked = time.time()
    with path.open("a+", encoding="utf-8") as file:
        with contextlib.suppress(OSError):  # disks without locks: then both build, which is safe
            fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        failure = file.read() if os.fstat(file.fileno()).st_mtime >= asked else ""
        if not failure:
            file.truncate(0)
        yield file, failure


def _compile(
    source: Path,
    library: Path,
    flags: Sequence[str],
    timeout_seconds: float,
    progress: BuildProgress | None,
) -> None:
    """Builds one library."""
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise MachineError(
            f"`{source.name}` cannot be built: there is no C++ compiler ({', '.join(_COMPILERS)}); "
            "install one, such as g++"
        )
    name, deadline = Path(compiler).name, time.monotonic() + timeout_seconds
    # A session of its own, so that all its processes end with it.
    process = subprocess.Popen(  # noqa: S603  our own words, no shell
        (compiler, str(source), "-o", str(library), *_torch_flags(), *flags),
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    try:
        message = _wait(process, min(_QUIET_SECONDS, timeout_seconds))
        if message is None and progress is not None:
            progress(f"building {source.name} with {name}", 0, None)
        if message is None:
            message = _wait(process, deadline - time.monotonic())
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if message is None:
        raise MachineError(
            f"`{name}` has not built `{source.name}` after {timeout_seconds:g} s and was ended; "
            "see whether it works, or install another compiler"
        )
    if process.returncode:
        raise MachineError(
            f"`{name}` cannot build `{source.name}`: {_first_error(message)}; "
            "repair it, or install another compiler"
        )


def _wait(process: subprocess.Popen[str], seconds: float) -> str | None:
    """What a process has written as errors when it ends; None if it has not ended in time."""
    try:
        return process.communicate(timeout=max(0.0, seconds))[1]
    except subprocess.TimeoutExpired:
        return None


def _first_error(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return shorten(next((line for line in lines if "error" in line), (lines or ["no reason"])[0]))


def _torch_flags() -> tuple[str, ...]:
    """What every library needs to be built against torch."""
    spec = find_spec("torch")
    folder = Path(((spec and spec.submodule_search_locations) or ("",))[0])
    include, libraries = folder / "include", folder / "lib"
    # torch's own OpenMP runtime: two would compete for the cores. Wheels differ in its name.
    places = (libraries, folder.parent / "torch.libs")
    openmp = [str(path) for place in places for path in sorted(place.glob("libgomp*.so*"))[:1]]
    return (
        "-std=c++20", "-O2", "-fPIC", "-shared", f"-I{include}", f"-L{libraries}",
        f"-Wl,-rpath,{libraries}", "-lc10", "-Wl,--as-needed", *openmp[:1],
    )  # fmt: skip
