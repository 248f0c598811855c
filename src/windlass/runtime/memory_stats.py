"""Current, peak and usable memory of the process or its accelerator; out-of-memory errors."""

import errno
import os
import re
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from windlass.hardware import available_memory_bytes
from windlass.torch_ext import FREE_MEMORY_BYTES, allocator_stats, set_memory_limit
from windlass.units import format_bytes, parse_bytes

_STATUS = Path("/proc/self/status")
_STATM = Path("/proc/self/statm")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
"""Resets the peak to the current memory. Source: Linux, `man 5 proc_pid_clear_refs`."""

_MESSAGES = ("can't allocate memory", "not enough memory", "std::bad_alloc", "out of memory")
"""Texts of the errors with which torch, its libraries and our own allocator refuse memory."""

_REQUESTED = re.compile(r"[Tt]ried to allocate ([\d.]+) ?(bytes|[KMGT]iB)")
_LIMITS = ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData"))
"""Limits that a shell or a job queue sets, and the status field that counts towards each. Source:
`man 2 getrlimit`."""


def peak_bytes(device: torch.device) -> int:
    """Peak memory since the last reset: resident memory on a CPU, allocated memory on CUDA."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _status_bytes("VmHWM") if _STATUS.exists() else _usage_bytes()


def current_bytes(device: torch.device) -> int:
    """Current memory: resident memory on a CPU, allocated memory on CUDA."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    if _STATM.exists():
        return int(_STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return _usage_bytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """Keeps a process under its memory budget by limiting what torch's allocator keeps free."""

    tensor_bytes: int
    """Largest memory of live tensors."""
    budget_bytes: int
    """Resident memory that the process may take."""

    def apply(self) -> None:
        """Sets the limit for what the process takes now; the allocator returns what is above it.

        The process itself grows in its first steps, as code is first used. Memory that is kept
        free gives way to that.
        """
        stats = allocator_stats()
        if stats is None:
            return
        process_bytes = current_bytes(torch.device("cpu")) - stats.reserved
        # Before the first tensor the process has its growth still ahead of it.
        growth_bytes = FREE_MEMORY_BYTES if not stats.total_mapped else FREE_MEMORY_BYTES // 8
        free = self.budget_bytes - process_bytes - growth_bytes - self.tensor_bytes
        set_memory_limit(self.tensor_bytes + min(max(free, 0), FREE_MEMORY_BYTES))


class PeakMemory:
    """Peak memory since its creation, and since the last sample.

    Where the system does not let a process reset its peak, memory used earlier counts too, and a
    sample returns the current memory.

    Args:
        device: the device whose memory is measured.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        _reset_peak(device)
        self._overall = 0

    def sample(self) -> int:
        """Peak bytes since the last sample."""
        peak = peak_bytes(self._device)
        self._overall = max(self._overall, peak)
        return peak if _reset_peak(self._device) else current_bytes(self._device)

    def overall_bytes(self) -> int:
        """Peak bytes since this object was created."""
        self._overall = max(self._overall, peak_bytes(self._device))
        return self._overall


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


def _reset_peak(device: torch.device) -> bool:
    """Resets the peak; False if the system does not permit it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        _CLEAR.write_text(_RESET_PEAK)
    except OSError:
        return False
    return True


def _status_bytes(key: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return _usage_bytes()


def _usage_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # macOS counts bytes, all others KiB.
    return peak if sys.platform == "darwin" else peak * 1024


def _left_under_limits() -> tuple[int, ...]:
    if not _STATUS.exists():
        return ()
    fields = (line.split() for line in _STATUS.read_text().splitlines())
    used = {words[0].rstrip(":"): int(words[1]) * 1024 for words in fields if words[-1:] == ["kB"]}
    limits = ((resource.getrlimit(which)[0], used.get(name, 0)) for which, name in _LIMITS)
    return tuple(limit - taken for limit, taken in limits if limit != resource.RLIM_INFINITY)
