"""Measures what not all plans need of a machine: attention, compiled code, sparse products.

The first plan of a new machine does not wait for what it has no use for.
"""

import statistics
import warnings
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple, get_args

import torch

from windlass.hardware.probe.attention import (
    ATTENTION_WAYS,
    WAY_MEASUREMENTS,
    attention_rates,
    attention_sizes,
    compiled_rates,
    typical_rates,
)
from windlass.hardware.probe.compile_costs import CompileCosts, measure_compile_costs
from windlass.hardware.probe.disk_and_network import CpuContention
from windlass.hardware.probe.matmul import (
    DTYPES,
    TimedProduct,
    converted_precisions,
    fit_terms,
    matmul_rates,
)
from windlass.hardware.probe.operands import ColdMemory
from windlass.hardware.probe.speed_check import speed_check_seconds
from windlass.hardware.probe.stopwatch import BUDGET_SECONDS, ProbeBar, ProbeProgress, Stopwatch
from windlass.schema import (
    PRECISION_BYTES,
    Device,
    Machine,
    MachinePart,
    MatmulRate,
    Precision,
    ProductRole,
    SparseProductRate,
)
from windlass.sparsity import BlockPart, BlockSparseLinear
from windlass.torch_ext import Device as TorchDevice, device_for, install_allocator

_MEASUREMENTS = {"compiled code": 1, "sparse products": 96, "float16": 50}
"""Measurements of each part, about; the others are ways of attention."""


def parts_of(device: TorchDevice) -> tuple[MachinePart, ...]:
    """The parts that a device has."""
    if device.is_asynchronous:
        return ("compiled code",)
    return get_args(MachinePart)


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
    bar = ProbeBar(progress, sum(_MEASUREMENTS.get(part, WAY_MEASUREMENTS) for part in wanted))
    converted = converted_precisions(device.torch_device)
    checks = [speed_check_seconds(device.torch_device)]
    costs = None
    if "compiled code" in wanted:
        bar.label("compiled code")
        own = [rate.precision for rate in machine.device.matmul if rate.precision not in converted]
        costs = measure_compile_costs(device, own)
        bar.step()
    bar.label(" and ".join(part for part in wanted if part != "compiled code") or "speed")
    measured = _measure_twice(bar, wanted, machine, device, converted)
    checks.append(speed_check_seconds(device.torch_device))
    slower = statistics.fmean(checks) / machine.speed_check_seconds
    completed = _with_rates(machine.device, measured.slowed_down(1 / slower))
    if costs is not None:
        completed = _with_compiled(completed, costs, slower)
    bar.end()
    left = tuple(part for part in machine.unmeasured if part not in wanted)
    return machine.model_copy(update={"device": completed, "unmeasured": left})


def _measure_twice(
    bar: ProbeBar,
    wanted: Collection[MachinePart],
    known: Machine,
    device: TorchDevice,
    converted: Collection[Precision],
) -> Device:
    """The device with rates of sparse products and attention as measured now, and with float16."""
    waiting = CpuContention()
    watch = Stopwatch(
        device.torch_device, budget_seconds=BUDGET_SECONDS, waiting_share=waiting.take_share
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tuple(_rates(bar, wanted, known, watch, converted))
        watch.start_second_round()
        rates = tuple(_rates(bar, wanted, known, watch, converted))
    waiting.close()
    return known.device.model_copy(update={"matmul": rates})


def _rates(
    bar: ProbeBar,
    wanted: Collection[MachinePart],
    known: Machine,
    watch: Stopwatch,
    converted: Collection[Precision],
) -> Iterator[MatmulRate]:
    ways = [way for part, way in ATTENTION_WAYS.items() if part in wanted]
    for rate in known.device.matmul:
        is_converted = rate.precision in converted
        sparse: tuple[SparseProductRate, ...] = ()
        if "sparse products" in wanted and not is_converted:
            sparse = sparse_product_rates(rate.precision, watch, bar.step)
        sizes = attention_sizes(watch.device, is_converted=is_converted)
        attention = attention_rates(DTYPES[rate.precision], sizes, ways, watch, bar.step)
        yield rate.model_copy(
            update={
                "sparse_products": sparse,
                "attention": typical_rates(attention, sizes) or rate.attention,
                "attention_rates": attention,
            }
        )
    if "float16" in wanted:
        ways += [way for part, way in ATTENTION_WAYS.items() if part not in known.unmeasured]
        is_converted = "float16" in converted
        yield matmul_rates("float16", watch, bar.step, ways=ways, is_converted=is_converted)


def _with_rates(device: Device, measured: Device) -> Device:
    """The device with the rates that are new beside its own.

    Args:
        measured: the same with new rates of sparse products and attention in place of its own.
    """
    old = {rate.precision: rate for rate in device.matmul}
    rates: list[MatmulRate] = []
    for new in measured.matmul:
        if (own := old.get(new.precision)) is None:
            rates.append(new)
            continue
        is_first = bool(new.attention_rates) and not own.attention_rates
        rates.append(
            own.model_copy(
                update={
                    "sparse_products": own.sparse_products + new.sparse_products,
                    "attention": new.attention if is_first else own.attention,
                    "attention_rates": own.attention_rates + new.attention_rates,
                }
            )
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


_BLOCKS = (16, 32, 64, 128)
_SHAPES = (
    (64, 1024, 1024, 2), (256, 2048, 1024, 4), (1024, 4096, 1024, 8), (1024, 1024, 4096, 8),
    (2048, 1024, 1024, 4), (1024, 2048, 8192, 8),
)  # fmt: skip
"""Tokens, outputs and inputs of layers, and the one of so many blocks of each row that is kept."""


def sparse_product_rates(
    precision: Precision, watch: Stopwatch, on_measured: Callable[[], None]
) -> tuple[SparseProductRate, ...]:
    """Times of products with kept blocks, for each side of a block and each role.

    Args:
        on_measured: called after each shape of each side.
    """
    rates: list[SparseProductRate] = []
    memory = ColdMemory(DTYPES[precision], watch.device)
    for block in _BLOCKS:
        timed: dict[ProductRole, list[TimedProduct]] = {}
        for shape in _SHAPES:
            for work in _works(*shape, block=block, precision=precision, memory=memory):
                product = TimedProduct(*work.amounts, watch.seconds(work.run))
                timed.setdefault(work.role, []).append(product)
            on_measured()
        rates += (
            SparseProductRate(block=block, role=role, **fit_terms(products)._asdict())
            for role, products in timed.items()
        )
    return tuple(rates)


class _Work(NamedTuple):
    """One product of a layer."""

    role: ProductRole
    run: Callable[[], object]
    amounts: tuple[float, float, float]
    """FLOP, bytes of what is packed, and of the result, as `SparseProductRate` counts them."""


def _works(
    tokens: int, outputs: int, inputs: int, share: int, *, block: int, precision: Precision,
    memory: ColdMemory,
) -> Iterator[_Work]:  # fmt: skip
    """The three products of a layer, with weights and saved inputs that come from memory."""
    part = BlockPart(rows=outputs // block, kept=inputs // block // share)
    dtype, itemsize = DTYPES[precision], PRECISION_BYTES[precision]
    layer = BlockSparseLinear(inputs, outputs, bias=True, block=block, parts=(part,)).to(dtype)
    values, blocks, bias = layer.values.detach(), layer.blocks, layer.bias
    x, gradient = (torch.randn(tokens, features).to(dtype) for features in (inputs, outputs))
    weights = (each.view(values.shape) for each in memory.tensors(1, values.numel()))
    saved = memory.tensors(tokens, inputs)
    ops, kept = torch.ops.windlass, values.numel()
    flop = 2.0 * tokens * kept
    yield _Work(
        "forward",
        lambda: ops.block_linear(x, next(weights), blocks, outputs, bias),
        (flop, itemsize * kept, itemsize * tokens * outputs),
    )
    yield _Work(
        "input_gradient",
        lambda: ops.block_linear_input_grad(gradient, next(weights), blocks, inputs),
        (flop, itemsize * kept, itemsize * tokens * inputs),
    )
    yield _Work(
        "weight_gradient",
        lambda: ops.block_linear_weight_grad(gradient, next(saved), blocks, block),
        (flop, itemsize * tokens * (inputs + outputs), itemsize * kept),
    )
