"""Seals the code that torch.compile keeps on the disk, so that damaged code is compiled anew.

A run that is killed while it links leaves a library that is empty or ends early, which torch would
load for ever after: it only asks whether the file is there. Such a one is removed too.

torch runs what it finds in its cache: a flipped bit there ends in a syntax error or a crash, or in
other numbers. So the hash of each file is noted once it was used, and a file that has changed since
is removed, which torch takes for code that was never compiled.
"""

import contextlib
import json
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, MethodType
from typing import cast

import torch
from torch import Tensor

from windlass.atomic_files import FileState, atomic_write, file_state, hash_file
from windlass.errors import StorageError

SEALS_FILE = "windlass-seals.json"
_UNSEALED = (".lock", ".tmp", ".best_config")
"""Files that are no code, or that torch rewrites."""
_LINK_SECONDS, _POLL_SECONDS = 20.0, 0.1
_ELF64 = b"\x7fELF\x02"
"""The first bytes of a library of 64 bits on Linux."""
_ELF64_HEADER = struct.Struct("<40xQ10xHH2x")
"""Offset of the table of sections, and size and number of its entries."""
_Seals = dict[str, tuple[FileState, str]]
"""State on disk and SHA-256 by path in the folder."""


@contextlib.contextmanager
def sealed_compile_cache() -> Iterator[None]:
    """Removes damaged code from torch's cache before the block compiles, and seals it afterwards.

    The first time reads all of the cache, 0.5 s of a core per GB; later only new files are read.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    folder = Path(cache_dir())
    remove_changed_files(folder)
    remove_torn_libraries(folder)
    yield
    seal_files(folder)


def remove_changed_files(folder: Path) -> tuple[str, ...]:
    """Removes files whose content is not the sealed one, and returns their paths in the folder."""
    removed: list[str] = []
    for name, (state, sha256) in _load(folder).items():
        path = folder / name
        with contextlib.suppress(OSError):  # torch has removed it, or another process has
            if file_state(path) != state and hash_file(path) != sha256:
                path.unlink()
                removed.append(name)
    return tuple(removed)


def remove_torn_libraries(folder: Path, *, link_seconds: float = _LINK_SECONDS) -> tuple[str, ...]:
    """Removes libraries whose linker was killed, and returns their paths in the folder.

    Args:
        link_seconds: time that a file has to become whole, as another process may still write it.
    """
    removed: list[str] = []
    for path in sorted(folder.rglob("*.so")):
        with contextlib.suppress(OSError):  # another process has removed it
            began = time.monotonic()
            while not _is_whole(path):
                # A clock that was set back makes a file younger than nothing.
                age = max(time.time() - path.stat().st_mtime, time.monotonic() - began)
                if age > link_seconds:
                    path.unlink()
                    removed.append(path.relative_to(folder).as_posix())
                    break
                time.sleep(_POLL_SECONDS)
    return tuple(removed)


def _is_whole(library: Path) -> bool:
    """Whether a library reaches as far as its header says: the table of sections ends an ELF file.

    Source: System V ABI, chapter 4, ELF header. Other formats are only known not to be empty.
    """
    with library.open("rb") as file:
        header = file.read(_ELF64_HEADER.size)
    if header[:5] != _ELF64:
        return len(header) > len(_ELF64) and not _ELF64.startswith(header)
    if len(header) < _ELF64_HEADER.size:
        return False
    sections, entry_bytes, entries = (int(each) for each in _ELF64_HEADER.unpack(header))
    end = sections + entry_bytes * entries
    return sections > 0 and library.stat().st_size >= end


def seal_files(folder: Path) -> None:
    """Notes the content of all files; those that are sealed and unchanged are not read again."""
    earlier, seals = _load(folder), _Seals()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if name == SEALS_FILE or path.name.endswith(_UNSEALED):
            continue
        with contextlib.suppress(OSError):  # a folder, or removed meanwhile
            state = file_state(path)
            known = earlier.get(name)
            seals[name] = known if known and known[0] == state else (state, hash_file(path))
    if seals != earlier:
        with contextlib.suppress(StorageError, OSError):  # damage would go unnoticed, no more
            content = {name: [*state, sha256] for name, (state, sha256) in seals.items()}
            atomic_write(folder / SEALS_FILE, json.dumps(content))


def _load(folder: Path) -> _Seals:
    """The seals of a folder; empty if there are none, or their file is damaged."""
    try:
        rows = json.loads((folder / SEALS_FILE).read_text(encoding="utf-8"))
        return {
            name: ((int(size), int(modified), int(changed), int(inode)), str(sha256))
            for name, (size, modified, changed, inode, sha256) in rows.items()
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def compile_method(
    method: Callable[..., Tensor], owner: object, *, unknown_rows: bool = False
) -> Callable[..., Tensor]:
    """A method of one object as compiled code.

    Args:
        unknown_rows: whether an operator may give as many rows as it finds in a run. All other
            shapes never change.
    """
    own = MethodType(_with_own_code(method), owner)
    run: Callable[..., Tensor] = torch.compile(own, fullgraph=True, dynamic=False)
    return _with_unknown_rows(run) if unknown_rows else run


def _with_unknown_rows(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    # Importing the compiler takes a second, which eager runs would take too.
    from torch._dynamo import config as dynamo_config

    def call(*arguments: object) -> Tensor:
        with dynamo_config.patch(capture_dynamic_output_shape_ops=True):
            return run(*arguments)

    return call


def _with_own_code(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same function with a code object of its own.

    torch.compile caches compiled code per code object, checks the guards of all its entries at each
    call, and gives up after eight entries: objects must not share a code object.
    """
    copy = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    return cast("Callable[..., Tensor]", copy)
