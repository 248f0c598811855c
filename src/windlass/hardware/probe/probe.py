"""Measures this machine: what every plan needs, and what few do if that is asked for.

It measures what training steps consist of and never a model: matrix products by size, fused
attention, element-wise ops, slower ops one by one, the optimizer, the cost of starting an op and
the memory of the process itself.
"""

import statistics
import warnings
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from windlass.atomic_files import free_disk_bytes
from windlass.hardware.local_machine import system_fingerprint
from windlass.hardware.probe.attention import (
    ACCELERATOR_WAYS,
    ATTENTION_WAYS,
    WAY_MEASUREMENTS,
    AttentionWay,
)
from windlass.hardware.probe.compile_costs import ProcessCosts, measure_process_costs
from windlass.hardware.probe.disk_and_network import (
    CpuContention,
    available_memory_bytes,
    disk_rates,
    host_copy_rates,
    loopback_link,
)
from windlass.hardware.probe.host_devices import measure_host_devices
from windlass.hardware.probe.machine_parts import measure_parts, parts_of
from windlass.hardware.probe.matmul import converted_precisions, matmul_rates, probed_precisions
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
from windlass.hardware.probe.stopwatch import BUDGET_SECONDS, ProbeBar, ProbeProgress, Stopwatch
from windlass.schema import (
    DEVICE_TIER,
    HOST_TIER,
    Device,
    Link,
    Machine,
    MachinePart,
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

_MEASUREMENTS = 260
"""Measurements beside those of attention, about, for the length of the progress bar."""

_PINNABLE_SHARE = 0.85
"""Share of the free host memory that runs may pin, by convention: the system takes no pinned page
back, and processes, files and what the driver keeps need some too."""


def probe_machine(
    progress: ProbeProgress | None, disk: Path, *, leave: Collection[MachinePart] = ()
) -> Machine:
    """Measures this machine: all its accelerators, or its CPU if it has none.

    All accelerators are measured at once, and then the slowest of them in full.

    Args:
        progress: called after each measurement; None for no reports.
        disk: a folder on the disk to measure; files are created there and removed.
        leave: parts that are not measured now; `measure_parts` can do so later.

    Raises:
        MachineError: something cannot be measured.
    """
    install_allocator()
    asked = sum(part not in leave for part in ATTENTION_WAYS)
    bar = ProbeBar(progress, _MEASUREMENTS + WAY_MEASUREMENTS * asked)
    bar.label("memory")
    capacity = available_memory_bytes()
    links: tuple[Link, ...] = (loopback_link(),)
    bar.step()
    accelerator = accelerator_device()
    count = accelerator.count()
    devices = None
    if accelerator.is_asynchronous:
        bar.label(f"{count} devices at once, and what joins them")
        devices = measure_host_devices(accelerator.kind, count)
    measured = device_for(f"{accelerator.kind}:{devices.slowest if devices else 0}")
    measured.activate()
    bar.label("memory of a process, and the disk")
    converted = converted_precisions(measured.torch_device)
    own = [each for each in probed_precisions(measured) if each not in converted]
    # A process is measured in bytes, which the disk's transfers do not change.
    with ThreadPoolExecutor(max_workers=1) as other:
        costs = other.submit(measure_process_costs, measured, own)
        disk_transfers = disk_rates(disk)
        process_costs = costs.result()
    bar.step()
    parts = parts_of(measured)
    now = [part for part in parts if part in ATTENTION_WAYS and part not in leave]
    ways = ACCELERATOR_WAYS if devices else [ATTENTION_WAYS[part] for part in now]
    device, conditions = _measure_twice(bar, process_costs, measured, converted, ways)
    device_memory = Tier(
        name=DEVICE_TIER, capacity_bytes=capacity if devices is None else devices.free_bytes
    )
    disk_tier = Tier(name="disk", capacity_bytes=free_disk_bytes(disk), **disk_transfers._asdict())
    offload_tiers: tuple[Tier, ...] = (disk_tier,)
    if devices is not None:
        device = device.with_slower_products(1 / devices.settled_share)
        pinnable = round(_PINNABLE_SHARE * capacity)
        offload_tiers = (_host_tier(pinnable // count, measured), disk_tier)
        links = devices.links
    bar.end()
    machine = Machine(
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
        unmeasured=tuple(part for part in parts if part not in now),
    )
    return measure_parts(
        machine, [part for part in parts if part not in leave], progress, device=measured
    )


class _Conditions(NamedTuple):
    """Conditions under which the device was measured."""

    noise: float
    contention: float
    speed_check_seconds: float


def _measure_twice(
    bar: ProbeBar,
    process_costs: ProcessCosts,
    measured: TorchDevice,
    converted: frozenset[Precision],
    ways: Sequence[AttentionWay],
) -> tuple[Device, _Conditions]:
    """The device as the mean of two rounds that are seconds apart."""
    kind = measured.torch_device
    waiting = CpuContention()
    watch = Stopwatch(kind, budget_seconds=BUDGET_SECONDS, waiting_share=waiting.take_share)
    contention = CpuContention()
    speed_checks = [speed_check_seconds(kind)]
    _measure_device(bar, process_costs, watch, measured, converted, ways)
    speed_checks.append(speed_check_seconds(kind))
    watch.start_second_round()
    device = _measure_device(bar, process_costs, watch, measured, converted, ways)
    speed_checks.append(speed_check_seconds(kind))
    share = contention.take_share() or 0.0
    contention.close()
    waiting.close()
    return device, _Conditions(watch.noise, share, statistics.fmean(speed_checks))


def _measure_device(
    bar: ProbeBar,
    process_costs: ProcessCosts,
    watch: Stopwatch,
    measured: TorchDevice,
    converted: frozenset[Precision],
    ways: Sequence[AttentionWay],
) -> Device:
    """The device with its measured rates and without its tiers.

    Args:
        converted: precisions that the processor has no products for.
    """
    kind = measured.kind
    rates: list[MatmulRate] = []
    ops: list[OpRate] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for precision in probed_precisions(measured):
            bar.label(f"products in {precision}")
            is_converted = precision in converted
            rate = matmul_rates(precision, watch, bar.step, ways=ways, is_converted=is_converted)
            rates.append(rate)
            bar.label(f"operations in {precision}")
            ops += op_rates(precision, watch, bar.step)
        if measured.is_asynchronous and measured.has_tf32():
            bar.label("products in tf32")
            with numerics(measured, deterministic=False, tf32=True):
                rates.append(matmul_rates("tf32", watch, bar.step, ways=ways))
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
            op_rates=tuple(ops),
            norm_rate=norm_rate(watch),
            mixed_norm_rate=mixed_norm_rate(watch),
            pass_seconds=layer_overhead_seconds(watch, launch),
            runtime_bytes=0 if measured.is_asynchronous else process_costs.runtime_bytes,
            update_call_seconds=update_call_seconds(watch),
            tiers=(Tier(name=DEVICE_TIER, capacity_bytes=0),),
        )


def _host_tier(capacity: int, device: TorchDevice) -> Tier:
    """Host memory as an offload tier of one accelerator."""
    rates = host_copy_rates(device.torch_device)
    return Tier(name=HOST_TIER, capacity_bytes=capacity, **rates._asdict())
