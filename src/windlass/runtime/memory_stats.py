"""Current and peak memory of the process, or of its accelerator."""

import os
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_STATM = Path("/proc/self/statm")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
"""Resets the peak to the current memory. Source: Linux, `man 5 proc_pid_clear_refs`."""


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
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # macOS counts bytes, all others KiB.
    return peak if sys.platform == "darwin" else peak * 1024
