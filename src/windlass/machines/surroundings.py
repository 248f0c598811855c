"""Surroundings: memory that is free, and what disk and loopback give."""

import contextlib
import mmap
import os
import statistics
import threading
import time
import uuid
from datetime import timedelta
from pathlib import Path

import torch
from torch._C._distributed_c10d import AllreduceOptions, HashStore, ProcessGroupGloo, Store

from windlass.files import storage_faults
from windlass.machines.timing import Stopwatch
from windlass.spec.machine import Link

_BLOCK = 4 * 2**20
_BLOCKS = 24
_HEADROOM = 0.05
"""Share of the free memory that is left to everybody else."""
_MESSAGES = 60
_COPIED = 2**26
"""Bytes of the copy that tells the rate between host and accelerator; a power of two, as torch
would round it up to one."""
_COPYING_SECONDS = 0.05
_LARGE = 2**22
"""Elements of the message that tells the rate of loopback."""


def free_bytes() -> int:
    """Memory that a new process may fill: the less of free memory and this group's limit."""
    limits = [_meminfo("MemAvailable")]
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        limits.append(limit - used)
    return round(min(limits) * (1 - _HEADROOM))


def process_bytes() -> int:
    """Resident memory of this process."""
    return _status("VmRSS")


class Contention:
    """How much the threads of this process had to wait for a core since this was made.

    Source: Linux, `Documentation/scheduler/sched-stats.rst`, /proc/<pid>/schedstat.
    """

    def __init__(self) -> None:
        self._before = _ran_and_waited()

    @property
    def share(self) -> float:
        """Waiting over running and waiting; 0 where the system does not tell."""
        ran, waited = (
            now - then for now, then in zip(_ran_and_waited(), self._before, strict=True)
        )
        return waited / (ran + waited) if waited > 0 else 0.0


def _ran_and_waited() -> tuple[int, int]:
    """Nanoseconds, over all threads."""
    ran = waited = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError):
            ran_here, waited_here, _ = map(int, path.read_text().split())
            ran, waited = ran + ran_here, waited + waited_here
    return ran, waited


def disk_rates(folder: Path) -> tuple[float, float]:
    """Bytes/s of reading and writing in `folder`, past the page cache where the system allows.

    Raises:
        StorageError: the folder does not take a file.
    """
    path = folder / f".probe.{uuid.uuid4().hex[:8]}.tmp"
    with storage_faults(path):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            write = _written(path)
            return _read(path), write
        finally:
            path.unlink(missing_ok=True)


def copy_rates(device: torch.device) -> tuple[float, float]:
    """Bytes/s from memory of the host into a device's, and back; pinned, as a run has it.

    Args:
        device: an accelerator; a CPU copies from its memory into its memory.
    """
    host = torch.ones(_COPIED, dtype=torch.uint8, pin_memory=device.type == "cuda")
    near = torch.ones(_COPIED, dtype=torch.uint8, device=device)
    watch = Stopwatch(device, budget_seconds=_COPYING_SECONDS)
    read = watch.seconds(lambda: near.copy_(host, non_blocking=True))
    write = watch.seconds(lambda: host.copy_(near, non_blocking=True))
    return _COPIED / read, _COPIED / write


def gloo_link() -> Link:
    """Latency and rate of an all-reduce between two ranks on loopback, in two threads."""
    store = HashStore()
    found: list[tuple[float, float]] = []
    threads = [
        threading.Thread(target=_rank, args=(store, rank, found), daemon=True) for rank in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    latency = statistics.median(small for small, _ in found)
    large = statistics.median(seconds for _, seconds in found)
    # Between two ranks a ring carries the buffer once: 2(n-1)/n = 1.
    rate = 4 * _LARGE / max(large - latency, 1e-9)
    return Link(name="loopback", joins=2, latency=latency / 2, rate=rate)


def _rank(store: Store, rank: int, found: list[tuple[float, float]]) -> None:
    group = ProcessGroupGloo(store, rank, 2, timedelta(seconds=20))
    small, large = torch.ones(1), torch.ones(_LARGE)
    seconds = [_reduced(group, small) for _ in range(_MESSAGES)]
    found.append((statistics.median(seconds[5:]), min(_reduced(group, large) for _ in range(4))))


def _reduced(group: ProcessGroupGloo, buffer: torch.Tensor) -> float:
    start = time.perf_counter()
    group.allreduce([buffer], AllreduceOptions()).wait()  # type: ignore[attr-defined]
    return time.perf_counter() - start


def _open(path: Path, flags: int) -> int:
    """Opens past the page cache, or through it on a file system that knows no other way."""
    direct = getattr(os, "O_DIRECT", 0)
    try:
        return os.open(path, flags | direct, 0o600)
    except OSError:
        return os.open(path, flags, 0o600)


def _written(path: Path) -> float:
    # Direct access wants memory that lies on a page; an anonymous map does.
    with mmap.mmap(-1, _BLOCK) as block:
        block.write(os.urandom(_BLOCK))
        handle = _open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            start = time.perf_counter()
            for _ in range(_BLOCKS):
                os.write(handle, block)
            os.fsync(handle)
            return _BLOCK * _BLOCKS / (time.perf_counter() - start)
        finally:
            os.close(handle)


def _read(path: Path) -> float:
    with mmap.mmap(-1, _BLOCK) as block:
        handle = _open(path, os.O_RDONLY)
        try:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            start = time.perf_counter()
            for _ in range(_BLOCKS):
                os.readv(handle, [block])
            return _BLOCK * _BLOCKS / (time.perf_counter() - start)
        finally:
            os.close(handle)


def _meminfo(key: str) -> int:
    return _kibibytes(Path("/proc/meminfo"), key) or (
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    )


def _status(key: str) -> int:
    return _kibibytes(Path("/proc/self/status"), key)


def _kibibytes(path: Path, key: str) -> int:
    """Bytes of a `key: number kB` line; 0 where there is none."""
    if not path.exists():
        return 0
    for line in path.read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return 0
