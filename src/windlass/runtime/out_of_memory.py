"""Shortage: tells a lack of memory from other errors, and how much a process could hold."""

import errno
import re
import resource
from pathlib import Path

import torch

from windlass.hardware.probe.disk_and_network import available_memory_bytes
from windlass.runtime.memory_stats import current_bytes
from windlass.units import format_bytes, parse_bytes

_WORDS = ("can't allocate memory", "not enough memory", "std::bad_alloc", "out of memory")
"""What torch, its libraries and our own blocks say where an allocation is refused."""

_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) ?(bytes|[KMGT]iB)")
_STATUS = Path("/proc/self/status")
_LIMITS = ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData"))
"""Limits that a shell or a queue sets, and what counts towards them. Source: `man 2 getrlimit`."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _WORDS)


def requested_bytes_clause(error: BaseException) -> str:
    """`, where 2.00 GiB more were asked for`; nothing if the error does not say."""
    found = _ASKED.search(str(error))
    if found is None:
        return ""
    unit = found[2].replace("bytes", "B")
    return f", where {format_bytes(parse_bytes(f'{found[1]} {unit}'))} more were asked for"


def usable_bytes(device: torch.device) -> int:
    """What this process could hold all in all: what it holds, and what is free to it."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device)
    return current_bytes(device) + max(0, min((available_memory_bytes(), *_left_by_limits())))


def _left_by_limits() -> tuple[int, ...]:
    if not _STATUS.exists():
        return ()
    fields = (line.split() for line in _STATUS.read_text().splitlines())
    used = {words[0].rstrip(":"): int(words[1]) * 1024 for words in fields if words[-1:] == ["kB"]}
    limits = ((resource.getrlimit(which)[0], used.get(name, 0)) for which, name in _LIMITS)
    return tuple(limit - taken for limit, taken in limits if limit != resource.RLIM_INFINITY)
