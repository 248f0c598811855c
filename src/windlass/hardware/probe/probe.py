"""Probe: measures this machine in under a minute.

What is measured is what a training step is made of, never a model: products over their size,
fused attention, plain traffic, the ops that are slower than traffic, the optimizer, the
cost of starting an op, and what the process itself holds.
"""

import statistics
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import torch

from windlass.atomic_files import free_disk_bytes
from windlass.hardware.local_machine import system_fingerprint
from windlass.hardware.probe.compile_costs import CompileCosts, measure_compile_costs
from windlass.hardware.probe.disk_and_network import (
    CpuContention,
    available_memory_bytes,
    disk_rates,
    host_copy_rates,
    loopback_link,
)
from windlass.hardware.probe.matmul import matmul_rates
from windlass.hardware.probe.memory_bandwidth import (
    elementwise_rates,
    launch_seconds,
    layer_overhead_seconds,
    mixed_norm_rate,
    mixed_update_rate,
    moment_rates,
    norm_rate,
    op_rates,
    update_call_seconds,
    update_rate,
)
from windlass.hardware.probe.speed_check import speed_check_seconds
from windlass.hardware.probe.stopwatch import Stopwatch
from windlass.schema.graph import Precision
from windlass.schema.machine import Device, Machine, MatmulRate, OpRate, Tier
from windlass.schema.plan import DEVICE_TIER, HOST_TIER
from windlass.torch_ext.cpu_allocator import install_allocator

_PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16")
_BUDGET_SECONDS = 0.015
"""For one measurement; there are about 120 in each of two rounds."""
_STAGES = 260
"""Measurements, roughly: the progress bar's length."""

ProbeProgress = Callable[[str, int, int | None], None]
"""Told what is being measured, how many measurements are done, and of how many."""


def probe(progress: ProbeProgress | None, disk: Path) -> Machine:
    """Measures this machine.

    Args:
        progress: told how far it is; None if nobody asks.
        disk: a folder on the disk to measure; a file is made there and removed.

    Raises:
        MachineError: something cannot be measured.
        StorageError: the folder does not take a file.
    """
    install_allocator()
    bar = _Bar(progress)
    bar.label("memory and disk")
    capacity = available_memory_bytes()
    disk_moves = disk_rates(disk)
    bar.step()
    bar.label("loopback")
    links = (loopback_link(),)
    bar.label("compiled code")
    trial = measure_compile_costs()
    device, rounds = _two_rounds(bar, trial)
    on_cpu = device.kind == "cpu"
    near = Tier(name=DEVICE_TIER, capacity_bytes=capacity if on_cpu else _accelerator_bytes())
    far = Tier(name="disk", capacity_bytes=free_disk_bytes(disk), **disk_moves._asdict())
    tiers = (near, far) if on_cpu else (near, _host(capacity), far)
    bar.end()
    return Machine(
        name="here",
        devices_per_host=1,
        device=device.model_copy(update={"tiers": tiers}),
        links=links,
        source="measured here",
        date=datetime.now(UTC).date().isoformat(),
        noise=rounds.noise,
        contention=rounds.contention,
        speed_check_seconds=rounds.yardstick_seconds,
        system=system_fingerprint(),
    )


class _Rounds(NamedTuple):
    """Under what the device was measured."""

    noise: float
    contention: float
    yardstick_seconds: float


def _two_rounds(bar: "_Bar", trial: CompileCosts) -> tuple[Device, _Rounds]:
    """The device as two rounds that are seconds apart find it."""
    kind = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    watch = Stopwatch(kind, budget_seconds=_BUDGET_SECONDS)
    contention = CpuContention()
    yardsticks = [speed_check_seconds(kind)]
    _device(bar, trial, watch)
    yardsticks.append(speed_check_seconds(kind))
    watch.start_second_round()
    device = _device(bar, trial, watch)
    yardsticks.append(speed_check_seconds(kind))
    return device, _Rounds(watch.noise, contention.share, statistics.fmean(yardsticks))


class _Bar:
    """Counts measurements for whoever watches."""

    def __init__(self, progress: ProbeProgress | None) -> None:
        self._progress = progress
        self._label = ""
        self._done = 0

    def label(self, label: str) -> None:
        self._label = label
        self._tell()

    def step(self) -> None:
        self._done = min(self._done + 1, _STAGES - 1)
        self._tell()

    def end(self) -> None:
        self._done = _STAGES
        self._tell()

    def _tell(self) -> None:
        if self._progress is not None:
            self._progress(f"measuring {self._label}", self._done, _STAGES)


def _device(bar: _Bar, trial: CompileCosts, watch: Stopwatch) -> Device:
    """The rates of the device that a run would take; tiers are left open.

    Args:
        bar: told of each measurement.
        trial: what a fresh process took.
        watch: times the work.
    """
    kind = watch.device.type
    on_cpu = kind == "cpu"
    rates: list[MatmulRate] = []
    ops: list[OpRate] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for precision in _PRECISIONS:
            bar.label(f"products in {precision}")
            rates.append(matmul_rates(precision, watch, bar.step))
            bar.label(f"operations in {precision}")
            ops += op_rates(precision, watch, bar.step)
        bar.label("optimizer and launches")
        launch = launch_seconds(watch)
        return Device(
            kind=kind,
            matmul=tuple(rates),
            traffic=elementwise_rates(watch),
            launch_seconds=launch,
            update_rate=update_rate(watch),
            mixed_update_rate=mixed_update_rate(watch),
            moment_rates=moment_rates(watch),
            op_rates=(*ops, *trial.op_rates) if on_cpu else tuple(ops),
            norm_rate=norm_rate(watch),
            mixed_norm_rate=mixed_norm_rate(watch),
            pass_seconds=layer_overhead_seconds(watch, launch),
            compiled_pass_seconds=trial.compiled_pass_seconds,
            compile_seconds=trial.compile_seconds,
            runtime_bytes=trial.runtime_bytes if on_cpu else 0,
            compiler_bytes=trial.compiler_bytes if on_cpu else 0,
            update_call_seconds=update_call_seconds(watch),
            tiers=(Tier(name=DEVICE_TIER, capacity_bytes=0),),
        )


def _host(capacity: int) -> Tier:
    """The host's memory, as an accelerator reaches it."""
    return Tier(
        name=HOST_TIER, capacity_bytes=capacity, **host_copy_rates(torch.device("cuda"))._asdict()
    )


def _accelerator_bytes() -> int:
    free, _ = torch.cuda.mem_get_info()
    return int(free)
