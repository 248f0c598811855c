"""Holds torch's memory on a CPU to a limit, and keeps what is free within it.

Left to the C library, memory goes two bad ways. Blocks that are mapped one by one go back to the
system when they are freed; it clears them again for the next step, and where the machine is a
virtual one whose host takes free pages away, getting them back costs half a second a GiB. Blocks
that stay in a heap fill it with holes: up to 1.7 times what is alive, and nobody can foresee it.
So torch gets an allocator of our own (`blocks.cpp`), built once for each version of torch.

Measured on 2 cores of an AMD EPYC (Zen 5, glibc 2.36, Linux 6.18, torch 2.13, 2026-11), a step and
the most that was held, beside what was predicted to be alive:

| | gpt2-124m, 8 x 256, bfloat16, compiled | gpt-mini, 8 x 256, float32, recompute |
|---|---|---|
| alive | 2952 MiB | 690 MiB |
| blocks above 2 MiB mapped one by one | 4.9 s, 2960 MiB | 1.45 s, 710 MiB |
| everything in the heap | 2.95 s, 3203 MiB | 1.11 s, 939 MiB |
| this | 2.95 s, 2948 MiB | 1.12 s, 677 MiB |
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
from functools import cache
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from windlass.atomic_files import cache_folder

FREE_MEMORY_FRACTION = 0.05
"""Of the predicted peak, kept in free blocks beyond it. With none at all a step that alternates
between many sizes moves pages all the time: gpt-mini, 2 x 256, bfloat16, compiled, recompute takes
166 ms a step with none and 133 to 141 ms with this."""

_SOURCE = "blocks.cpp"
_COMPILERS = ("c++", "g++", "clang++")
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_NEVER = 2**31 - 1


def install_allocator() -> bool:
    """Has torch take its memory from blocks of our own from now on.

    The probe and every run call it before torch makes its first large tensor; again it does no
    harm. Without Linux or a C++ compiler memory stays in the C library's heap: as fast, but with
    holes that no prediction tells of.

    Returns:
        Whether blocks are in use.
    """
    if _blocks() is not None:
        return True
    _keep_heap()
    return False


def set_memory_limit(nbytes: int | None) -> None:
    """Sets how much blocks may hold together, free ones included; what is alive may exceed it.

    Args:
        nbytes: the limit; None is none.
    """
    blocks = _blocks()
    if blocks is not None:
        blocks.windlass_blocks_limit(ctypes.c_uint64(2**64 - 1 if nbytes is None else nbytes))


class AllocatorStats(NamedTuple):
    """Bytes of all blocks."""

    allocated: int
    reserved: int
    """Alive, or free and kept."""
    peak_allocated: int
    """Since it was asked last."""
    total_mapped: int
    """That the system was asked for, all told."""


def allocator_stats() -> AllocatorStats | None:
    """What blocks hold; None if there are none."""
    blocks = _blocks()
    if blocks is None:
        return None
    told = (ctypes.c_uint64 * 4)()
    blocks.windlass_blocks_tell(told)
    return AllocatorStats(*told)


def trim_heap() -> None:
    """Gives free memory back to the system: what made the tokens is no part of the training."""
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


@cache
def _blocks() -> ctypes.CDLL | None:
    """The library, in use by torch; None where it cannot be built."""
    if not sys.platform.startswith("linux"):
        return None
    built = _built()
    if built is None:
        return None
    import torch  # noqa: F401  its libraries must be there before ours

    library = ctypes.CDLL(str(built))
    library.windlass_blocks_install()
    return library


def _built() -> Path | None:
    """The library on disk, built if this version of torch has none yet; takes about a second."""
    source = resources.files(__package__).joinpath(_SOURCE).read_bytes()
    name = hashlib.sha256(source + version("torch").encode()).hexdigest()[:16]
    library = cache_folder() / f"blocks-{name}.so"
    if library.exists():
        return library
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        return None
    torch = Path(_torch_folder())
    beside = library.with_name(f".{library.name}.{os.getpid()}")
    library.parent.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(  # noqa: S603  our own words, no shell
        (compiler, "-x", "c++", "-", "-std=c++20", "-O2", "-fPIC", "-shared", "-o", str(beside),
         f"-I{torch / 'include'}", f"-L{torch / 'lib'}", "-lc10", f"-Wl,-rpath,{torch / 'lib'}"),
        input=source, capture_output=True, check=False,
    )  # fmt: skip
    if done.returncode:
        beside.unlink(missing_ok=True)
        return None
    beside.replace(library)
    return library


def _torch_folder() -> str:
    import torch

    return torch.__path__[0]


def _keep_heap() -> None:
    """Lets the C library keep all memory in its heap, the best that it can do for speed."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_M_MMAP_MAX, 0)
        set_option(_M_TRIM_THRESHOLD, _NEVER)
