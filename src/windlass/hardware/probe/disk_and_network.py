"""Measures free memory, contention for cores, and the rates of disk, host copies and loopback."""

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
from windlass.schema import Link
from windlass.torch_ext import device_for

_THREADS = Path("/proc/self/task")
_BLOCK = 4 * 2**20
"""Bytes read or written at a time, as a training run does."""
_FILE = 64 * _BLOCK
_DISK_ROUNDS = 5
_HEADROOM = 0.05
"""Share of the free memory that is left to other processes."""
_MESSAGES = 60
_COPIED = 2**26
"""Bytes of the copy that measures the rate between host and accelerator. A power of two, because
torch rounds pinned memory up to one."""
_COPYING_SECONDS = 0.05
_LARGE = 2**22
"""Elements of the message that measures the rate of loopback."""


def available_memory_bytes() -> int:
    """Bytes that a new process may fill: the smaller of free memory and what the cgroup allows."""
    limits = [_meminfo("MemAvailable")]
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        limits.append(limit - used)
    return round(min(limits) * (1 - _HEADROOM))


def resident_memory_bytes() -> int:
    """Bytes of resident memory of this process."""
    return _status("VmRSS")


class CpuContention:
    """Share of time that the threads of this process waited for a core.

    Source: Linux, `Documentation/scheduler/sched-stats.rst`, /proc/<pid>/schedstat. The files stay
    open: to open them takes four times as long as to read them.
    """

    def __init__(self) -> None:
        self._files: dict[str, int] = {}
        self._before = self._ran_and_waited()

    def take_share(self) -> float | None:
        """Waiting time over running and waiting time since the last call or the creation.

        None if the system does not report it.
        """
        ran = waited = 0
        now, before = self._ran_and_waited(), self._before
        for thread, (thread_ran, thread_waited) in now.items():
            ran_before, waited_before = before.get(thread, (0, 0))
            ran, waited = ran + thread_ran - ran_before, waited + thread_waited - waited_before
        self._before = now
        return waited / (ran + waited) if ran > 0 else None

    def close(self) -> None:
        """Closes the system's files; closing twice is harmless."""
        while self._files:
            os.close(self._files.popitem()[1])

    def _ran_and_waited(self) -> dict[str, tuple[int, int]]:
        """Nanoseconds that each thread of this process ran, and waited for a core."""
        spent: dict[str, tuple[int, int]] = {}
        # Every training step comes here, and `iterdir` would make a path of each name.
        threads = os.listdir(_THREADS) if _THREADS.is_dir() else []  # noqa: PTH208
        for thread in {*threads, *self._files}:
            try:
                if thread not in self._files:
                    flags = os.O_RDONLY | os.O_CLOEXEC
                    self._files[thread] = os.open(f"{_THREADS}/{thread}/schedstat", flags)
                ran, waited, _ = os.pread(self._files[thread], 64, 0).split()
            except (OSError, ValueError):  # the thread has ended, or the system keeps no statistics
                if thread in self._files:
                    os.close(self._files.pop(thread))
            else:
                spent[thread] = int(ran), int(waited)
        return spent


class TransferRates(NamedTuple):
    """Bytes/s between a tier and device memory."""

    read: float
    write: float
    both: float
    """Bytes read and written together while both directions are busy."""


def disk_rates(folder: Path) -> TransferRates:
    """Rates of reading and writing files in `folder`, bypassing the page cache where possible.

    The files are allocated first and then overwritten, as a training run does with its files, out
    of memory of the same allocator: a disk takes large pages faster than small ones. Each rate is
    the median of rounds in turn, because a disk that others share changes from second to second.
    """
    stem = f".probe.{uuid.uuid4().hex[:8]}"
    paths = [folder / f"{stem}.{index}.tmp" for index in range(2)]
    with storage_errors(paths[0]), contextlib.ExitStack() as stack:
        folder.mkdir(parents=True, exist_ok=True)
        handles: list[int] = []
        for path in paths:
            stack.callback(path.unlink, missing_ok=True)
            handles.append(_open(path))
            stack.callback(os.close, handles[-1])
        one, other = ((handle, _random_block()) for handle in handles)
        for handle, block in (one, other):
            _stream_file(handle, block, os.pwritev)  # allocates its blocks
        rounds = [
            (
                _FILE / _seconds((*one, os.preadv)),
                _FILE / _seconds((*one, os.pwritev)),
                2 * _FILE / _seconds((*one, os.preadv), (*other, os.pwritev)),
            )
            for _ in range(_DISK_ROUNDS)
        ]
        return TransferRates(*map(statistics.median, zip(*rounds, strict=True)))


def host_copy_rates(device: torch.device) -> TransferRates:
    """Rates of copies from host memory to device memory and back; host memory is pinned.

    Args:
        device: an accelerator, or a CPU, which copies within its own memory.
    """
    streams = device_for(device)
    pinned = streams.has_pinned_memory
    host_buffers = [torch.ones(_COPIED, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
    device_buffers = [torch.ones(_COPIED, dtype=torch.uint8, device=device) for _ in range(2)]
    copy_streams = [streams.new_stream() for _ in range(2)]

    def to_device() -> None:
        device_buffers[0].copy_(host_buffers[0], non_blocking=True)

    def to_host() -> None:
        host_buffers[1].copy_(device_buffers[1], non_blocking=True)

    def both() -> None:
        main_stream = streams.current_stream()
        for stream, copy in zip(copy_streams, (to_device, to_host), strict=True):
            stream.wait_stream(main_stream)
            with streams.use_stream(stream):
                copy()
        for stream in copy_streams:
            main_stream.wait_stream(stream)

    watch = Stopwatch(device, budget_seconds=_COPYING_SECONDS)
    read, write, together = (watch.seconds(work) for work in (to_device, to_host, both))
    return TransferRates(_COPIED / read, _COPIED / write, 2 * _COPIED / together)


def loopback_link() -> Link:
    """The loopback link, from gloo all-reduces between two ranks in two threads."""
    store = HashStore()
    timings: list[tuple[float, float]] = []
    threads = [
        threading.Thread(target=_time_all_reduces, args=(store, rank, timings), daemon=True)
        for rank in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    latency = statistics.median(small for small, _ in timings)
    large = statistics.median(seconds for _, seconds in timings)
    # Between two ranks a ring all-reduce sends the buffer once: 2(n-1)/n = 1.
    rate = 4 * _LARGE / max(large - latency, 1e-9)
    return Link(name="loopback", joins=2, latency=latency / 2, rate=rate)


def _time_all_reduces(store: Store, rank: int, timings: list[tuple[float, float]]) -> None:
    group = ProcessGroupGloo(store, rank, 2, timedelta(seconds=20))
    small, large = torch.ones(1), torch.ones(_LARGE)
    seconds = [_all_reduce_seconds(group, small) for _ in range(_MESSAGES)]
    timings.append(
        (statistics.median(seconds[5:]), min(_all_reduce_seconds(group, large) for _ in range(4)))
    )


def _all_reduce_seconds(group: ProcessGroupGloo, buffer: torch.Tensor) -> float:
    start = time.perf_counter()
    group.allreduce([buffer], AllreduceOptions()).wait()  # type: ignore[attr-defined]
    return time.perf_counter() - start


def _open(path: Path) -> int:
    """Opens a new file with direct I/O, or without it on file systems that do not support it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o600)
    except OSError:
        path.unlink(missing_ok=True)  # some file systems create the file before they refuse
        return os.open(path, flags, 0o600)


_Call = Callable[[int, list[memoryview], int], int]


def _random_block() -> memoryview:
    """Random bytes at the beginning of a page, as direct I/O needs them."""
    memory = torch.randint(0, 256, (_BLOCK + mmap.PAGESIZE,), dtype=torch.uint8)
    skipped = -memory.data_ptr() % mmap.PAGESIZE
    block: memoryview = memory[skipped : skipped + _BLOCK].numpy().data
    return block


def _stream_file(handle: int, block: memoryview, call: _Call) -> None:
    """Reads or writes the whole file block by block."""
    for offset in range(0, _FILE, _BLOCK):
        call(handle, [block], offset)
    if call is os.pwritev:
        os.fdatasync(handle)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)


def _seconds(*passes: tuple[int, memoryview, _Call]) -> float:
    """Seconds that these passes over files take when they run at the same time."""
    with ThreadPoolExecutor(len(passes)) as pool:
        start = time.perf_counter()
        for future in [pool.submit(_stream_file, *each) for each in passes]:
            future.result()
        return time.perf_counter() - start


def _meminfo(key: str) -> int:
    return _kibibytes(Path("/proc/meminfo"), key) or (
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    )


def _status(key: str) -> int:
    return _kibibytes(Path("/proc/self/status"), key)


def _kibibytes(path: Path, key: str) -> int:
    """Bytes of the line `key: number kB`; 0 if there is no such line."""
    if not path.exists():
        return 0
    for line in path.read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return 0
