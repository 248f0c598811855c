"""What the process, or its accelerator, holds now and held at most."""

import os
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_STATM = Path("/proc/self/statm")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
"""Sets the peak back to what is held now. Source: Linux, `man 5 proc_pid_clear_refs`."""


def peak_bytes(device: torch.device) -> int:
    """The most that was held since its peak was begun anew: all resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _status_bytes("VmHWM") if _STATUS.exists() else _usage_bytes()


def current_bytes(device: torch.device) -> int:
    """What is held now."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    if _STATM.exists():
        return int(_STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return _usage_bytes()


class PeakMemory:
    """The most that was held since it was made, and since the last look.

    Where the system does not let a process begin its peak anew, what was held before counts too,
    and a look sees what is held now.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        _forget_peak(device)
        self._highest = 0

    def sample(self) -> int:
        """The most that was held since the last look."""
        peak = peak_bytes(self._device)
        self._highest = max(self._highest, peak)
        return peak if _forget_peak(self._device) else current_bytes(self._device)

    def overall_bytes(self) -> int:
        """The most that was held since this was made."""
        self._highest = max(self._highest, peak_bytes(self._device))
        return self._highest


def _forget_peak(device: torch.device) -> bool:
    """Begins the peak anew; False where the system does not let us."""
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
