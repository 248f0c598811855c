"""Surroundings: memory that is free, and what disk and loopback give."""

import contextlib
import mmap
import os
import statistics
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
from torch._C._distributed_c10d import AllreduceOptions, HashStore, ProcessGroupGloo, Store

from windlass.atomic_files import storage_errors
from windlass.hardware.probe.stopwatch import Stopwatch
from windlass.schema.machine import Link

_BLOCK = 8 * 2**20
"""Bytes read or written at a time, as a run does."""
_FILE = 32 * _BLOCK
_HEADROOM = 0.05
"""Share of the free memory that is left to everybody else."""
_MESSAGES = 60
_COPIED = 2**26
"""Bytes of the copy that tells the rate between host and accelerator; a power of two, as torch
would round it up to one."""
_COPYING_SECONDS = 0.05
_LARGE = 2**22
"""Elements of the message that tells the rate of loopback."""


def available_memory_bytes() -> int:
    """Memory that a new process may fill: the less of free memory and this group's limit."""
    limits = [_meminfo("MemAvailable")]
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        limits.append(limit - used)
    return round(min(limits) * (1 - _HEADROOM))


def resident_memory_bytes() -> int:
    """Resident memory of this process."""
    return _status("VmRSS")


class CpuContention:
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


class TransferRates(NamedTuple):
    """Bytes/s between a tier and the near one."""

    read: float
    write: float
    both: float
    """Read and written together where both go on at once."""


def disk_rates(folder: Path) -> TransferRates:
    """Rates of files in `folder`, past the page cache where the system allows.

    As a run has them: files have their room from the start, and are written over and over.

    Raises:
        StorageError: the folder does not take a file.
    """
    stem = f".probe.{uuid.uuid4().hex[:8]}"
    paths = [folder / f"{stem}.{at}.tmp" for at in range(2)]
    with storage_errors(paths[0]), contextlib.ExitStack() as stack:
        folder.mkdir(parents=True, exist_ok=True)
        handles: list[int] = []
        for path in paths:
            stack.callback(path.unlink, missing_ok=True)
            handles.append(_open(path))
            stack.callback(os.close, handles[-1])
            _pass_over(handles[-1], os.pwritev)  # finds its room
        first, second = handles
        return TransferRates(
            read=_FILE / _seconds((first, os.preadv)),
            write=_FILE / _seconds((first, os.pwritev)),
            both=2 * _FILE / _seconds((first, os.preadv), (second, os.pwritev)),
        )


def host_copy_rates(device: torch.device) -> TransferRates:
    """Rates from memory of the host into a device's, and back; pinned, as a run has it.

    Args:
        device: an accelerator; a CPU copies from its memory into its memory.
    """
    pinned = device.type == "cuda"
    hosts = [torch.ones(_COPIED, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
    nears = [torch.ones(_COPIED, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = torch.get_device_module(device)
    own = [streams.Stream() for _ in range(2)]

    def there() -> None:
        nears[0].copy_(hosts[0], non_blocking=True)

    def back() -> None:
        hosts[1].copy_(nears[1], non_blocking=True)

    def both() -> None:
        now = streams.current_stream()
        for stream, move in zip(own, (there, back), strict=True):
            stream.wait_stream(now)
            with streams.stream(stream):
                move()
        for stream in own:
            now.wait_stream(stream)

    watch = Stopwatch(device, budget_seconds=_COPYING_SECONDS)
    read, write, together = (watch.seconds(work) for work in (there, back, both))
    return TransferRates(_COPIED / read, _COPIED / write, 2 * _COPIED / together)


def loopback_link() -> Link:
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


def _open(path: Path) -> int:
    """Opens past the page cache, or through it on a file system that knows no other way."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o600)
    except OSError:
        path.unlink(missing_ok=True)  # some make the file before they refuse
        return os.open(path, flags, 0o600)


_Call = Callable[[int, list[mmap.mmap], int], int]


def _pass_over(handle: int, call: _Call) -> None:
    """Reads or writes a whole file."""
    # Direct access wants memory that lies on a page; an anonymous map does.
    with mmap.mmap(-1, _BLOCK) as block:
        block.write(os.urandom(_BLOCK))
        for at in range(0, _FILE, _BLOCK):
            call(handle, [block], at)
    if call is os.pwritev:
        os.fdatasync(handle)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)


def _seconds(*passes: tuple[int, _Call]) -> float:
    """Seconds of passes over files that go on at once."""
    with ThreadPoolExecutor(len(passes)) as pool:
        begun = time.perf_counter()
        for done in [pool.submit(_pass_over, *each) for each in passes]:
            done.result()
        return time.perf_counter() - begun


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
