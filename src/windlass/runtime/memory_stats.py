"""Current, peak and usable memory of the process or its accelerator; out-of-memory errors."""

import errno
import re
from dataclasses import dataclass

import torch

from windlass.hardware import available_memory_bytes
from windlass.torch_ext import (
    FREE_MEMORY_BYTES,
    Device,
    allocator_stats,
    bytes_left_under_limits,
    resident_bytes,
    set_memory_limit,
)
from windlass.units import format_bytes, parse_bytes

_MESSAGES = ("can't allocate memory", "not enough memory", "std::bad_alloc", "out of memory")
"""Texts of the errors with which torch, its libraries and our own allocator refuse memory."""

_REQUESTED = re.compile(r"[Tt]ried to allocate ([\d.]+) ?(bytes|[KMGT]iB)")


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
        process_bytes = resident_bytes() - stats.reserved
        # Before the first tensor the process has its growth still ahead of it.
        growth_bytes = FREE_MEMORY_BYTES if not stats.total_mapped else FREE_MEMORY_BYTES // 8
        free = self.budget_bytes - process_bytes - growth_bytes - self.tensor_bytes
        set_memory_limit(self.tensor_bytes + min(max(free, 0), FREE_MEMORY_BYTES))


class PeakMemory:
    """Peak memory since its creation, and since the last sample.

    Where the system does not let a process reset its peak, memory used earlier counts too, and a
    sample returns the current memory.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        device.reset_peak_memory()
        self._overall = 0

    def sample(self) -> int:
        """Peak bytes since the last sample."""
        peak = self._device.peak_memory()
        self._overall = max(self._overall, peak)
        was_reset = self._device.reset_peak_memory()
        return peak if was_reset else self._device.memory_allocated()

    def overall_bytes(self) -> int:
        """Peak bytes since this object was created."""
        self._overall = max(self._overall, self._device.peak_memory())
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


def usable_bytes(device: Device) -> int:
    """Memory that this process can use in total: what it uses now, and what is free for it."""
    if device.kind != "cpu":
        return device.memory_reserved() + device.free_memory()
    free = min((available_memory_bytes(), *bytes_left_under_limits()))
    return device.memory_allocated() + max(0, free)
