"""Measures the host while a run goes on, and appends that to a journal from a thread of its own."""

import contextlib
import importlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

from windlass.tracking.journal import SYSTEM_PREFIX, JournalWriter

_FIRST_SECONDS, _LAST_SECONDS = 1.0, 10.0
"""Time between two rows: at the start of a run, so that short ones have some, and later."""
_GROWTH = 0.1
"""Share of the time that has passed, between the two."""
_PRESSURE = Path("/proc/pressure")
_STALLED_MICROSECONDS = re.compile(r"^some .* total=([0-9]+)$", re.MULTILINE)

_GPU_MEASUREMENTS: dict[str, Callable[[Any, Any], float]] = {
    "": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
    "_memory_bytes": lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
    "_watts": lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
    "_celsius": lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
}
"""What NVIDIA's library measures, by the end of a name; the library and a handle are given."""


class SystemMonitor:
    """Appends a row of `sys.cpu` and others about once in ten seconds while the block runs.

    Nothing that it cannot measure or write ends the run.

    Args:
        first_seconds: time until the first row; later ones are up to ten times as far apart.
    """

    def __init__(self, journal: JournalWriter, *, first_seconds: float = _FIRST_SECONDS) -> None:
        self._journal = journal
        self._first_seconds = first_seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="system monitor", daemon=True)

    def __enter__(self) -> Self:
        with contextlib.suppress(RuntimeError):  # the system has no more threads
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        # The folder may be gone, which the run says itself, or memory; the run is what matters.
        with contextlib.suppress(Exception):
            start, readings = time.monotonic(), HostReadings()
            while not self._stop.wait(self._seconds(time.monotonic() - start)):
                row = {f"{SYSTEM_PREFIX}{name}": value for name, value in readings.take().items()}
                self._journal.append_row(self._journal.last_step, row)

    def _seconds(self, passed: float) -> float:
        longest = self._first_seconds * _LAST_SECONDS / _FIRST_SECONDS
        return min(longest, max(self._first_seconds, _GROWTH * passed))


class HostReadings:
    """What the host has done since the last reading."""

    def __init__(self) -> None:
        self._psutil: Any = importlib.import_module("psutil")  # it has no types
        self._nvml = _nvml()
        self._counters = self._read_counters()

    def take(self) -> dict[str, float]:
        """Measurements by name; those that the system does not give are left out.

        `seconds` since the last reading; `cpu`, the share of it for which the cores that this
        process may use were busy; `cpu_stall`, `io_stall` and `memory_stall`, the shares for which
        some process waited for these; `memory_bytes` that are in use; bytes read from and written
        to disks and received from and sent to networks since the last reading; and for each GPU
        `gpu0` the share of time that it was busy, its memory in use, its power and temperature.
        """
        before, now = self._counters, self._read_counters()
        self._counters = now
        grown = {name: now[name] - before[name] for name in now if name in before}
        seconds, cpu = grown.pop("seconds"), grown.pop("cpu_total", 0.0)
        row = {"seconds": seconds}
        if cpu > 0:
            # The kernel's counters of idle time may go back by a tick.
            row["cpu"] = min(1.0, max(0.0, grown.pop("cpu_busy") / cpu))
        for name, value in grown.items():
            if name.endswith("_stall"):
                # The kernel adds up stalls every two seconds only.
                row[name] = min(1.0, value / seconds) if seconds > 0 else 0.0
            elif name.endswith("_bytes"):
                row[name] = value
        for read in (self._memory, self._gpus):
            row |= _known(read)
        return row

    def _read_counters(self) -> dict[str, float]:
        counters = {"seconds": time.monotonic()}
        for read in (self._cpu, self._disk, self._network, _stalls):
            counters |= _known(read)
        return counters

    def _cpu(self) -> Iterator[tuple[str, float]]:
        cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
        times = [
            core
            for index, core in enumerate(self._psutil.cpu_times(percpu=True))
            if cores is None or index in cores
        ]
        # A guest's time is part of the user's already.
        total = sum(sum(core) - getattr(core, "guest", 0.0) for core in times)
        idle = sum(core.idle + getattr(core, "iowait", 0.0) for core in times)
        yield "cpu_total", total
        yield "cpu_busy", total - idle

    def _memory(self) -> Iterator[tuple[str, float]]:
        memory = self._psutil.virtual_memory()
        yield "memory_bytes", memory.total - memory.available

    def _disk(self) -> Iterator[tuple[str, float]]:
        if disk := self._psutil.disk_io_counters():
            yield "disk_read_bytes", disk.read_bytes
            yield "disk_written_bytes", disk.write_bytes

    def _network(self) -> Iterator[tuple[str, float]]:
        if network := self._psutil.net_io_counters():
            yield "net_received_bytes", network.bytes_recv
            yield "net_sent_bytes", network.bytes_sent

    def _gpus(self) -> Iterator[tuple[str, float]]:
        nvml = self._nvml
        for index in range(nvml.nvmlDeviceGetCount() if nvml else 0):
            gpu = nvml.nvmlDeviceGetHandleByIndex(index)
            for name, measure in _GPU_MEASUREMENTS.items():
                with contextlib.suppress(Exception):  # a part of a GPU (MIG) lacks some
                    yield f"gpu{index}{name}", measure(nvml, gpu)


def _known(read: Callable[[], Iterator[tuple[str, float]]]) -> dict[str, float]:
    """What a reading yields until the system refuses: a driver or a container may do so anywhere.

    psutil and NVML raise errors of their own, which all are some `Exception`.
    """
    row: dict[str, float] = {}
    with contextlib.suppress(Exception):
        for name, value in read():
            row[name] = float(value)
    return row


def _stalls() -> Iterator[tuple[str, float]]:
    """Seconds for which some process waited. Source: Linux, Documentation/accounting/psi.rst."""
    for name in ("cpu", "io", "memory"):
        if match := _STALLED_MICROSECONDS.search((_PRESSURE / name).read_text()):
            yield f"{name}_stall", int(match[1]) * 1e-6


def _nvml() -> Any:  # noqa: ANN401  a module without types
    """NVIDIA's library, once it is ready; None if it or its driver is missing."""
    with contextlib.suppress(Exception):
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        return nvml
    return None
