"""Recognizes out-of-memory errors, and measures how much memory the process can use."""

import errno
import re
import resource
from pathlib import Path

import torch

from windlass.hardware.probe.disk_and_network import available_memory_bytes
from windlass.runtime.memory_stats import current_bytes
from windlass.units import format_bytes, parse_bytes

_MESSAGES = ("can't allocate memory", "not enough memory", "std::bad_alloc", "out of memory")
"""Texts of the errors with which torch, its libraries and our own allocator refuse memory."""

_REQUESTED = re.compile(r"[Tt]ried to allocate ([\d.]+) ?(bytes|[KMGT]iB)")
_STATUS = Path("/proc/self/status")
_LIMITS = ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData"))
"""Limits that a shell or a job queue sets, and the status field that counts towards each. Source:
`man 2 getrlimit`."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _MESSAGES)


def requested_bytes_clause(error: BaseException) -> str:
    """`, where 2.00 GiB more were requested`; empty if the error does not say."""
    match = _REQUESTED.search(str(error))
    if match is None:
        return ""
    unit = match[2].replace("bytes", "B")
    return f", where {format_bytes(parse_bytes(f'{match[1]} {unit}'))} more were requested"


def usable_bytes(device: torch.device) -> int:
    """Memory that this process can use in total: what it uses now, and what is free for it."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device)
    return current_bytes(device) + max(0, min((available_memory_bytes(), *_left_under_limits())))


def _left_under_limits() -> tuple[int, ...]:
    if not _STATUS.exists():
        return ()
    fields = (line.split() for line in _STATUS.read_text().splitlines())
    used = {words[0].rstrip(":"): int(words[1]) * 1024 for words in fields if words[-1:] == ["kB"]}
    limits = ((resource.getrlimit(which)[0], used.get(name, 0)) for which, name in _LIMITS)
    return tuple(limit - taken for limit, taken in limits if limit != resource.RLIM_INFINITY)
