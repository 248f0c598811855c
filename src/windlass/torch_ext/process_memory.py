"""Resident memory of this process, now and at its peak, and what its limits leave."""

import os
import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")
_STATM = Path("/proc/self/statm")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
"""Resets the peak to the current memory. Source: Linux, `man 5 proc_pid_clear_refs`."""

_LIMITS = ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData"))
"""Limits that a shell or a job queue sets, and the status field that counts towards each. Source:
`man 2 getrlimit`."""


def resident_bytes() -> int:
    """Resident memory; where the system does not tell, its peak."""
    if _STATM.exists():
        return int(_STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return _usage_bytes()


def peak_resident_bytes() -> int:
    """Peak of resident memory since `reset_peak_resident`."""
    return _status_bytes("VmHWM") if _STATUS.exists() else _usage_bytes()


def reset_peak_resident() -> bool:
    """Resets the peak; False if the system does not permit it."""
    try:
        _CLEAR.write_text(_RESET_PEAK)
    except OSError:
        return False
    return True


def bytes_left_under_limits() -> tuple[int, ...]:
    """What each limit of this process still leaves; none where it has no limit."""
    if not _STATUS.exists():
        return ()
    fields = (line.split() for line in _STATUS.read_text().splitlines())
    used = {words[0].rstrip(":"): int(words[1]) * 1024 for words in fields if words[-1:] == ["kB"]}
    limits = ((resource.getrlimit(which)[0], used.get(name, 0)) for which, name in _LIMITS)
    return tuple(limit - taken for limit, taken in limits if limit != resource.RLIM_INFINITY)


def _status_bytes(key: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return _usage_bytes()


def _usage_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # macOS counts bytes, all others KiB.
    return peak if sys.platform == "darwin" else peak * 1024
