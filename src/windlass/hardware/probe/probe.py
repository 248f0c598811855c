"""Measures this machine in a minute and a half.

It measures what training steps consist of and never a model: matrix products by size, fused
attention, element-wise ops, slower ops one by one, the optimizer, the cost of starting an op and
the memory of the process itself.
"""

import statistics
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from windlass.atomic_files import free_disk_bytes
from windlass.hardware.local_machine import system_fingerprint
from windlass.hardware.probe.attention import compiled_rates
from windlass.hardware.probe.compile_costs import CompileCosts, measure_compile_costs
from windlass.hardware.probe.disk_and_network import (
    CpuContention,
    available_memory_bytes,
    disk_rates,
    host_copy_rates,
    loopback_link,
)
from windlass.hardware.probe.host_devices import measure_host_devices
from windlass.hardware.probe.matmul import PRECISIONS, converted_precisions, matmul_rates
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
from windlass.hardware.probe.sparse_products import sparse_product_rates
from windlass.hardware.probe.speed_check import speed_check_seconds
from windlass.hardware.probe.stopwatch import Stopwatch
from windlass.schema import (
    DEVICE_TIER,
    HOST_TIER,
    Device,
    Link,
    Machine,
    MatmulRate,
    OpRate,
    Precision,
    Tier,
)
from windlass.torch_ext import (
    Device as TorchDevice,
    accelerator_device,
    device_for,
    install_allocator,
    numerics,
)

_BUDGET_SECONDS = 0.015
"""Time budget of one measurement; there are about 120 in each of two rounds."""
_MEASUREMENTS = 600
"""Approximate number of measurements, which is the length of the progress bar."""

ProbeProgress = Callable[[str, int, int | None], None]
"""Receives what is being measured, the number of finished measurements and their total."""


def probe_machine(progress: ProbeProgress | None, disk: Path) -> Machine:
    """Measures this machine: all its accelerators, or its CPU if it has none.

    All accelerators are measured at once, and then the slowest of them in full.

    Args:
        progress: called after each measurement; None for no reports.
        disk: a folder on the disk to measure; files are created there and removed.

    Raises:
        MachineError: something cannot be measured.
        StorageError: the folder cannot take a file.
    """
    install_allocator()
    bar = _Bar(progress)
    bar.label("memory and disk")
    capacity = available_memory_bytes()
    disk_transfers = disk_rates(disk)
    bar.step()
    bar.label("loopback")
    links: tuple[Link, ...] = (loopback_link(),)
    accelerator = accelerator_device()
    count = accelerator.count()
    devices = None
    if accelerator.is_asynchronous:
        bar.label(f"{count} devices at once, and what joins them")
        devices = measure_host_devices(accelerator.kind, count)
    measured = device_for(f"{accelerator.kind}:{devices.slowest if devices else 0}")
    measured.activate()
    bar.label("compiled code")
    converted = converted_precisions(measured.torch_device)
    compile_costs = measure_compile_costs(
        measured, [each for each in PRECISIONS if each not in converted]
    )
    device, conditions = _measure_twice(bar, compile_costs, measured, converted)
    device_memory = Tier(
        name=DEVICE_TIER, capacity_bytes=capacity if devices is None else devices.free_bytes
    )
    disk_tier = Tier(name="disk", capacity_bytes=free_disk_bytes(disk), **disk_transfers._asdict())
    offload_tiers: tuple[Tier, ...] = (disk_tier,)
    if devices is not None:
        device = device.with_slower_products(1 / devices.settled_share)
        offload_tiers = (_host_tier(capacity // count, measured), disk_tier)
        links = devices.links
    bar.end()
    return Machine(
        name="here",
        devices_per_host=count,
        device=device.model_copy(update={"tiers": (device_memory, *offload_tiers)}),
        links=links,
        source="measured here",
        date=datetime.now(UTC).date().isoformat(),
        noise=conditions.noise,
        contention=conditions.contention,
        speed_check_seconds=conditions.speed_check_seconds,
        spread=None if devices is None else devices.spread,
        system=system_fingerprint(),
    )


class _Conditions(NamedTuple):
    """Conditions under which the device was measured."""

    noise: float
    contention: float
    speed_check_seconds: float


def _measure_twice(
    bar: "_Bar",
    compile_costs: CompileCosts,
    measured: TorchDevice,
    converted: frozenset[Precision],
) -> tuple[Device, _Conditions]:
    """The device as the mean of two rounds that are seconds apart."""
    kind = measured.torch_device
    waiting = CpuContention()
    watch = Stopwatch(kind, budget_seconds=_BUDGET_SECONDS, waiting_share=waiting.take_share)
    contention = CpuContention()
    speed_checks = [speed_check_seconds(kind)]
    _measure_device(bar, compile_costs, watch, measured, converted)
    speed_checks.append(speed_check_seconds(kind))
    watch.start_second_round()
    device = _measure_device(bar, compile_costs, watch, measured, converted)
    speed_checks.append(speed_check_seconds(kind))
    share = contention.take_share() or 0.0
    contention.close()
    waiting.close()
    return device, _Conditions(watch.noise, share, statistics.fmean(speed_checks))


class _Bar:
    """Reports each measurement to `progress`."""

    def __init__(self, progress: ProbeProgress | None) -> None:
        self._progress = progress
        self._label = ""
        self._done = 0

    def label(self, label: str) -> None:
        self._label = label
        self._report()

    def step(self) -> None:
        self._done = min(self._done + 1, _MEASUREMENTS - 1)
        self._report()

    def end(self) -> None:
        self._done = _MEASUREMENTS
        self._report()

    def _report(self) -> None:
        if self._progress is not None:
            self._progress(f"measuring {self._label}", self._done, _MEASUREMENTS)


def _requested_precisions(device: TorchDevice) -> tuple[Precision, ...]:
    """Precisions that only a request asks for; an accelerator's float16 has bfloat16's rates."""
    if not device.is_asynchronous:
        return ("float16",)
    return ("tf32",) if device.has_tf32() else ()


def _measure_device(
    bar: _Bar,
    compile_costs: CompileCosts,
    watch: Stopwatch,
    measured: TorchDevice,
    converted: frozenset[Precision],
) -> Device:
    """The device with its measured rates and without its tiers.

    Args:
        bar: reports each measurement.
        compile_costs: what a fresh process measured.
        watch: times the work.
        measured: the device.
        converted: precisions that the processor has no products for.
    """
    kind = measured.kind
    on_cpu = kind == "cpu"
    rates: list[MatmulRate] = []
    ops: list[OpRate] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for precision in PRECISIONS:
            bar.label(f"products in {precision}")
            is_converted = precision in converted
            rate = matmul_rates(precision, watch, bar.step, is_converted=is_converted)
            if on_cpu and not is_converted:
                bar.label(f"sparse products in {precision}")
                sparse = sparse_product_rates(precision, watch, bar.step)
                rate = rate.model_copy(update={"sparse_products": sparse})
            if (compiled_speed := compile_costs.attention.get(precision)) is not None:
                plain = rate.attention_rates
                compiled = compiled_rates(plain, compiled_speed)
                rate = rate.model_copy(update={"attention_rates": (*plain, *compiled)})
            rates.append(rate)
            bar.label(f"operations in {precision}")
            ops += op_rates(precision, watch, bar.step)
        for precision in _requested_precisions(measured):
            bar.label(f"products in {precision}")
            is_converted = precision in converted
            with numerics(measured, deterministic=False, tf32=precision == "tf32"):
                rate = matmul_rates(precision, watch, bar.step, is_converted=is_converted)
            rates.append(rate)
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
            op_rates=(*ops, *compile_costs.op_rates),
            norm_rate=norm_rate(watch),
            mixed_norm_rate=mixed_norm_rate(watch),
            pass_seconds=layer_overhead_seconds(watch, launch),
            compiled_pass_seconds=compile_costs.compiled_pass_seconds,
            compile_seconds=compile_costs.compile_seconds,
            runtime_bytes=compile_costs.runtime_bytes if on_cpu else 0,
            compiler_bytes=compile_costs.compiler_bytes if on_cpu else 0,
            update_call_seconds=update_call_seconds(watch),
            tiers=(Tier(name=DEVICE_TIER, capacity_bytes=0),),
        )


def _host_tier(capacity: int, device: TorchDevice) -> Tier:
    """Host memory as an offload tier of one accelerator."""
    rates = host_copy_rates(device.torch_device)
    return Tier(name=HOST_TIER, capacity_bytes=capacity, **rates._asdict())
