"""Measures in a fresh process what compiled code costs: memory, compile time and rates of ops.

`python -m windlass.hardware.probe.compile_costs DEVICE PRECISION...` prints `ProcessCosts` as JSON,
and `CompileCosts` with one more word, `compiled`.
It runs in a process of its own because the compiler fills memory that the probing process would
never free.
"""

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from windlass.child_processes import module_command
from windlass.document import Document
from windlass.errors import MachineError
from windlass.hardware.probe.attention import CompiledSpeed, compiled_speed
from windlass.hardware.probe.disk_and_network import CpuContention, resident_memory_bytes
from windlass.hardware.probe.matmul import DTYPES
from windlass.hardware.probe.memory_bandwidth import fused_adamw, layer_overhead_seconds
from windlass.hardware.probe.stopwatch import Stopwatch
from windlass.schema import PRECISION_BYTES, Curve, OpRate, Point, Precision
from windlass.torch_ext import (
    FREE_MEMORY_BYTES,
    Device,
    device_for,
    install_allocator,
    set_memory_limit,
)

_WIDTH = 768
_WEIGHTS = 12
"""Weights of a layer, as many as a GPT block has."""
_VOCABULARY = 8192
_BUDGET_SECONDS = 0.06
_COMPILED = "compiled"
_LIBRARIES = ("cyclopts", "rich.live", "rich.table", "tokenizers")
"""Libraries that a training run loads beside torch; their memory counts too."""


class ProcessCosts(Document):
    """Memory that a fresh process measured."""

    runtime_bytes: int
    """Held by the process beside live tensors, after running in all its precisions, and what the
    allocator keeps free."""


class CompileCosts(ProcessCosts):
    """Memory and times that a fresh process measured, which compiled."""

    compiler_bytes: int
    """Held in addition after compiling."""
    compile_seconds: float
    """Time to compile one type of layer, forward and backward."""
    compiled_pass_seconds: float
    """Cost on the host of one compiled pass, apart from its ops."""
    op_rates: tuple[OpRate, ...]
    """Rates of ops in compiled code."""
    attention: dict[Precision, CompiledSpeed]
    """How many times as fast compiled plain attention is, in each precision that was asked for."""


class _MeasuredOp(NamedTuple):
    """One compiled op that is measured: its shape, the ops that it stands for and its bytes."""

    precision: Precision
    forward: str
    backward: str
    width: int
    """Length of each input row."""
    rows: int
    """Number of rows in the measurement."""
    forward_times: int
    """Bytes that it moves forward, in multiples of its input."""
    backward_times: int
    """Bytes that it moves backward, in multiples of its input."""


def measure_process_costs(device: Device, precisions: Sequence[Precision]) -> ProcessCosts:
    """What a process costs before it allocates a tensor, measured in a fresh one.

    Raises:
        MachineError: the process failed; the message holds its error.
    """
    return ProcessCosts.model_validate_json(_answer_of_process(device, *precisions))


def measure_compile_costs(device: Device, precisions: Sequence[Precision]) -> CompileCosts:
    """What compiled code costs on this device, measured in a fresh process.

    Args:
        precisions: those in which it computes, and attention is measured.

    Raises:
        MachineError: the process failed; the message holds its error.
    """
    return CompileCosts.model_validate_json(_answer_of_process(device, *precisions, _COMPILED))


def _answer_of_process(device: Device, *words: str) -> str:
    """What this module prints as a program."""
    module = "windlass.hardware.probe.compile_costs"
    result = subprocess.run(  # noqa: S603  our own words, no shell
        module_command(module, str(device.torch_device), *words),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if result.returncode:
        last = result.stderr.strip().splitlines()[-1:]
        raise MachineError(f"a fresh process cannot be measured here: {' '.join(last)}")
    return result.stdout.splitlines()[-1]


def main() -> None:
    """Prints the costs that this process measures, as JSON."""
    install_allocator()
    device = device_for(sys.argv[1])
    device.activate()
    if device.is_asynchronous:
        torch.set_default_device(device.torch_device)
    precisions = [each for each in DTYPES if each in sys.argv[2:]]
    costs = _measure(device, precisions, compiled=_COMPILED in sys.argv[2:])
    sys.stdout.write(costs.to_json() + "\n")


def _measure(device: Device, precisions: Sequence[Precision], *, compiled: bool) -> ProcessCosts:
    waiting = CpuContention()
    watch = Stopwatch(
        device.torch_device, budget_seconds=_BUDGET_SECONDS, waiting_share=waiting.take_share
    )
    # Free blocks of the allocator must not count as memory of the process.
    set_memory_limit(0)
    _run_eagerly(precisions, watch)
    runtime_bytes = resident_memory_bytes() + FREE_MEMORY_BYTES
    costs = ProcessCosts(runtime_bytes=runtime_bytes)
    if compiled:
        costs = _compile(precisions, watch, runtime_bytes)
    waiting.close()
    return costs


def _compile(precisions: Sequence[Precision], watch: Stopwatch, runtime_bytes: int) -> CompileCosts:
    # This import loads much of the compiler, so it must come after the memory was read.
    from torch._inductor.utils import fresh_cache

    # Outside the fresh cache, so that what the compiler learns about the processor is kept.
    pass_seconds = _compiled_pass_seconds(watch)
    with fresh_cache():
        start = time.perf_counter()
        ops = _CompiledOps("float16" if "float16" in precisions else "bfloat16")
        compile_seconds = time.perf_counter() - start
        compiler_bytes = resident_memory_bytes() + FREE_MEMORY_BYTES - runtime_bytes
        attention = {each: compiled_speed(DTYPES[each], watch) for each in precisions}
    set_memory_limit(None)
    return CompileCosts(
        runtime_bytes=runtime_bytes,
        compiler_bytes=max(0, compiler_bytes),
        compile_seconds=compile_seconds,
        compiled_pass_seconds=pass_seconds,
        op_rates=tuple(ops.rates(watch)),
        attention=attention,
    )


def _run_eagerly(precisions: Sequence[Precision], watch: Stopwatch) -> None:
    """Loads what the first step of a run loads: products, attention, autograd, the optimizer."""
    for name in _LIBRARIES:
        import_module(name)
    # A run first builds its model on the meta device, for which torch loads its tracing code.
    nn.Embedding(8, 8, device="meta")
    layer_overhead_seconds(watch, 0.0)
    master, moment1, moment2, gradient = (torch.zeros(8) for _ in range(4))
    fused_adamw(master, moment1, moment2, gradient, torch.ones(()))
    for precision in precisions:
        _run_block(DTYPES[precision])


def _run_block(dtype: torch.dtype) -> None:
    """One forward and backward pass of what a transformer's layers and its loss consist of.

    Libraries keep code and buffers for each shape of a product, about 0.8 MiB; a model has 15 to
    25 such shapes, and so has this.
    """
    tokens, heads, width = 250, 6, 384
    layers = [
        module.to(dtype)
        for module in (
            nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width), nn.Linear(width, _VOCABULARY, bias=False),
        )
    ]  # fmt: skip
    norm, attend, widen, narrow, head = layers
    x = torch.randn(2, tokens, width).to(dtype).requires_grad_()
    split = attend(norm(x)).view(2, tokens, 3, heads, 64).permute(2, 0, 3, 1, 4)
    query, key, value = split.unbind()
    mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    y = x + mixed.transpose(1, 2).reshape(x.shape)
    y = y + narrow(functional.gelu(widen(y), approximate="tanh") * functional.silu(widen(y)))
    scores = head(y).float().view(-1, _VOCABULARY)
    loss = functional.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.int64))
    torch.autograd.grad(loss, [x, *(weight for each in layers for weight in each.parameters())])


def _compiled_pass_seconds(watch: Stopwatch) -> float:
    """Seconds of one pass of compiled code on eight by eight elements.

    Compiled code checks each weight before it runs, and autograd gives each its gradient.
    """
    compiled = torch.compile(_scale, dynamic=False)
    x = torch.ones(8, 8, requires_grad=True)
    weights = [torch.ones(8, requires_grad=True) for _ in range(_WEIGHTS)]
    gradient = torch.ones(8, 8)
    return (
        watch.seconds(lambda: torch.autograd.grad(compiled(x, weights), (x, *weights), gradient))
        / 2
    )


def _scale(x: Tensor, weights: list[Tensor]) -> Tensor:
    for weight in weights:
        x = x * weight
    return x


def _measured_ops(half: Precision) -> tuple[_MeasuredOp, ...]:
    """The ops in 16 bits; bytes are counted as `capture` counts those of compiled layers."""
    softmax, norm = "_log_softmax", "native_layer_norm"
    return (
        _MeasuredOp(half, softmax, f"{softmax}_backward_data", _VOCABULARY, 512, 1, 2),
        _MeasuredOp("float32", softmax, f"{softmax}_backward_data", _VOCABULARY, 512, 1, 2),
        _MeasuredOp(half, norm, f"{norm}_backward", _WIDTH, 2048, 2, 3),
        _MeasuredOp(half, "gelu", "gelu_backward", 4 * _WIDTH, 2048, 2, 3),
    )


_FEW_ROWS = 4
"""Rows of the ops that are not being measured."""


def _all_ops(
    scores: Tensor, wide_scores: Tensor, x: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor,
    *targets: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The ops of layers besides matrix products, in the order of `_measured_ops`."""
    return (
        functional.cross_entropy(scores.float(), targets[0]),
        functional.cross_entropy(wide_scores, targets[1]),
        functional.layer_norm(x, (_WIDTH,), weight, bias),
        functional.gelu(hidden, approximate="tanh"),
    )


class _Batch(NamedTuple):
    """Inputs of the compiled graph and gradients of its outputs."""

    inputs: list[Tensor]
    gradients: list[Tensor]


class _CompiledOps:
    """All ops as one compiled graph, which compiles in half the time of four graphs.

    The number of rows is dynamic, so that one op at a time can be made large enough to measure.
    """

    def __init__(self, half: Precision) -> None:
        self._ops = _measured_ops(half)
        self._compiled = torch.compile(_all_ops)
        self._forward_and_backward(_make_batch(self._ops, [op.rows for op in self._ops]))

    def rates(self, watch: Stopwatch) -> Iterator[OpRate]:
        """Rates of compiled code under the name of its slowest op."""
        small = _make_batch(self._ops, [_FEW_ROWS for _ in self._ops])
        small_forward, small_total = (
            watch.seconds(partial(work, small))
            for work in (self._forward, self._forward_and_backward)
        )
        for index, op in enumerate(self._ops):
            rows = [op.rows if index == at else _FEW_ROWS for at in range(len(self._ops))]
            batch = _make_batch(self._ops, rows)
            forward = watch.seconds(partial(self._forward, batch))
            total = watch.seconds(partial(self._forward_and_backward, batch))
            forward_seconds = max(forward - small_forward, 0.5 * forward)
            backward_seconds = max(total - forward - (small_total - small_forward), 0.1 * total)
            nbytes = op.rows * op.width * PRECISION_BYTES[op.precision]
            for name, moved, seconds in (
                (op.forward, op.forward_times * nbytes, forward_seconds),
                (op.backward, op.backward_times * nbytes, backward_seconds),
            ):
                curve = Curve(points=(Point(moved, moved / seconds),))
                yield OpRate(name=name, precision=op.precision, compiled=True, curve=curve)

    def _forward(self, batch: _Batch) -> tuple[Tensor, ...]:
        return self._compiled(*batch.inputs)

    def _forward_and_backward(self, batch: _Batch) -> None:
        differentiable = [x for x in batch.inputs if x.requires_grad]
        torch.autograd.grad(self._forward(batch), differentiable, batch.gradients)


def _make_batch(ops: Sequence[_MeasuredOp], rows: list[int]) -> _Batch:
    """Random inputs with this number of rows for each op; the compiler treats it as dynamic."""
    op_inputs = [
        torch.randn(count, op.width).to(DTYPES[op.precision]).requires_grad_()
        for op, count in zip(ops, rows, strict=True)
    ]
    targets = [torch.zeros(count, dtype=torch.int64) for count in rows[:2]]
    for tensor in (*op_inputs, *targets):
        torch._dynamo.mark_dynamic(tensor, 0)  # noqa: SLF001
    norm_parameters = [
        torch.ones(_WIDTH, dtype=op_inputs[2].dtype, requires_grad=True) for _ in range(2)
    ]
    loss_gradients = [torch.ones(()) for _ in targets]
    gradients = [*loss_gradients, *(torch.ones_like(x) for x in op_inputs[2:])]
    return _Batch([*op_inputs, *norm_parameters, *targets], gradients)


if __name__ == "__main__":
    main()
