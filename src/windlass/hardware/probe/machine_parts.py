"""Measures what few plans need of a machine: compiled code, sparse products, float16.

The first plan of a new machine does not wait for what it has no use for.
"""

import statistics
import warnings
from collections.abc import Collection, Iterator

from windlass.hardware.probe.attention import compiled_rates
from windlass.hardware.probe.compile_costs import CompileCosts, measure_compile_costs
from windlass.hardware.probe.disk_and_network import CpuContention
from windlass.hardware.probe.matmul import converted_precisions, matmul_rates
from windlass.hardware.probe.probe_bar import ProbeBar, ProbeProgress
from windlass.hardware.probe.sparse_products import sparse_product_rates
from windlass.hardware.probe.speed_check import speed_check_seconds
from windlass.hardware.probe.stopwatch import BUDGET_SECONDS, Stopwatch
from windlass.schema import (
    Device,
    Machine,
    MachinePart,
    MatmulRate,
    Precision,
)
from windlass.torch_ext import Device as TorchDevice, device_for, install_allocator

_MEASUREMENTS = {"compiled code": 1, "sparse products": 96, "float16": 50}
"""Measurements of each part, about."""


def parts_of(device: TorchDevice) -> tuple[MachinePart, ...]:
    """The parts that a device has."""
    if device.is_asynchronous:
        return ("compiled code",)
    return ("compiled code", "sparse products", "float16")


def measure_parts(
    machine: Machine,
    parts: Collection[MachinePart],
    progress: ProbeProgress | None,
    device: TorchDevice | None = None,
) -> Machine:
    """A measured machine with more of its parts.

    A shared machine is faster or slower than it was. So a speed check is made, and rates become
    those of the time when the others were measured.

    Args:
        machine: this machine; parts that it has are not measured again.
        parts: the parts.
        progress: called after each measurement; None for no reports.
        device: the device that is measured; None takes the first of its kind.

    Raises:
        MachineError: something cannot be measured.
    """
    wanted = tuple(part for part in machine.unmeasured if part in parts)
    if not wanted:
        return machine
    install_allocator()
    device = device_for(machine.device.kind) if device is None else device
    device.activate()
    bar = ProbeBar(progress, sum(_MEASUREMENTS[part] for part in wanted))
    checks = [speed_check_seconds(device.torch_device)]
    costs = None
    if "compiled code" in wanted:
        bar.label("compiled code")
        costs = measure_compile_costs(device, _own_products(machine.device))
        bar.step()
    bar.label(" and ".join(part for part in wanted if part != "compiled code") or "speed")
    measured = _measure_twice(bar, wanted, machine.device, device)
    checks.append(speed_check_seconds(device.torch_device))
    slower = statistics.fmean(checks) / machine.speed_check_seconds
    completed = _with_products(machine.device, measured.slowed_down(1 / slower))
    if costs is not None:
        completed = _with_compiled(completed, costs, slower)
    bar.end()
    left = tuple(part for part in machine.unmeasured if part not in wanted)
    return machine.model_copy(update={"device": completed, "unmeasured": left})


def _own_products(device: Device) -> tuple[Precision, ...]:
    """The precisions that were measured in full: those that the processor does not convert."""
    return tuple(rate.precision for rate in device.matmul if rate.products or device.kind != "cpu")


def _measure_twice(
    bar: ProbeBar, wanted: Collection[MachinePart], known: Device, device: TorchDevice
) -> Device:
    """The device with sparse products, and float16 behind its other precisions, as measured now."""
    waiting = CpuContention()
    watch = Stopwatch(
        device.torch_device, budget_seconds=BUDGET_SECONDS, waiting_share=waiting.take_share
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tuple(_products(bar, wanted, known, watch))
        watch.start_second_round()
        rates = tuple(_products(bar, wanted, known, watch))
    waiting.close()
    return known.model_copy(update={"matmul": rates})


def _products(
    bar: ProbeBar, wanted: Collection[MachinePart], known: Device, watch: Stopwatch
) -> Iterator[MatmulRate]:
    own = _own_products(known)
    for rate in known.matmul:
        if "sparse products" in wanted and rate.precision in own:
            sparse = sparse_product_rates(rate.precision, watch, bar.step)
            yield rate.model_copy(update={"sparse_products": sparse})
        else:
            yield rate
    if "float16" in wanted:
        converted = converted_precisions(watch.device)
        yield matmul_rates("float16", watch, bar.step, is_converted="float16" in converted)


def _with_products(device: Device, measured: Device) -> Device:
    """The device with what is new among the rates of products, and its own other rates."""
    old = {rate.precision: rate for rate in device.matmul}
    rates = (
        old[rate.precision].model_copy(update={"sparse_products": rate.sparse_products})
        if rate.precision in old
        else rate
        for rate in measured.matmul
    )
    return device.model_copy(update={"matmul": tuple(rates)})


def _with_compiled(device: Device, costs: CompileCosts, slower: float) -> Device:
    """The device with the rates of compiled code, of a time when it took `slower` times as long."""
    ops = device.model_copy(update={"op_rates": costs.op_rates}).slowed_down(1 / slower).op_rates
    rates = (
        rate.model_copy(
            update={"attention_rates": (*plain, *compiled_rates(plain, costs.attention[name]))}
        )
        if (name := rate.precision) in costs.attention and (plain := rate.attention_rates)
        else rate
        for rate in device.matmul
    )
    return device.model_copy(
        update={
            "matmul": tuple(rates),
            "op_rates": (*device.op_rates, *ops),
            "compiled_pass_seconds": costs.compiled_pass_seconds / slower,
            "compile_seconds": costs.compile_seconds / slower,
            "compiler_bytes": costs.compiler_bytes if device.kind == "cpu" else 0,
        }
    )
