"""Trial: a fresh process that runs a little eagerly, then compiled, and prints what that takes.

`python -m windlass.hardware.probe.compile_costs` prints one `Trial` as JSON. It runs in a
process of its own because compiling fills memory that the measured process would never give back.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from windlass.document import Document
from windlass.errors import MachineError
from windlass.hardware.probe.disk_and_network import resident_memory_bytes
from windlass.hardware.probe.matmul import DTYPES
from windlass.hardware.probe.memory_bandwidth import fused_adamw, layer_overhead_seconds
from windlass.hardware.probe.stopwatch import Stopwatch
from windlass.schema.graph import PRECISION_BYTES, Precision
from windlass.schema.machine import Curve, OpRate, Point
from windlass.torch_ext.cpu_allocator import install_allocator, set_memory_limit

_WIDTH = 768
_VOCABULARY = 8192
_BUDGET_SECONDS = 0.06
_LIBRARIES = ("cyclopts", "rich.live", "rich.table", "tokenizers")
"""What a run loads beside torch, and so holds."""


class CompileCosts(Document):
    """What a fresh process held and took."""

    runtime_bytes: int
    """Before any large tensor, having run both precisions."""
    compiler_bytes: int
    """On top, after compiling."""
    compile_seconds: float
    """Of one kind of layer."""
    compiled_pass_seconds: float
    op_rates: tuple[OpRate, ...]


class _Part(NamedTuple):
    """One part of the compiled trial: what it runs on, what it stands for, the bytes it moves."""

    precision: Precision
    forward: str
    backward: str
    width: int
    """Of the rows that it runs on."""
    rows: int
    """Where it is measured."""
    forward_times: int
    """Times the bytes of its input that it moves forward."""
    backward_times: int


def measure_compile_costs() -> CompileCosts:
    """The result of a trial in a process of its own.

    Raises:
        MachineError: it ended with an error, which the message holds.
    """
    done = subprocess.run(
        (sys.executable, "-m", "windlass.hardware.probe.compile_costs"),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise MachineError(f"compiled code cannot be measured here: {' '.join(last)}")
    return CompileCosts.model_validate_json(done.stdout.splitlines()[-1])


def main() -> None:
    """Prints the trial of this process."""
    install_allocator()
    sys.stdout.write(_trial().to_json() + "\n")


def _trial() -> CompileCosts:
    watch = Stopwatch(torch.device("cpu"), budget_seconds=_BUDGET_SECONDS)
    # What is free between two tensors is not held by the process as such.
    set_memory_limit(0)
    _run_eagerly(watch)
    before = resident_memory_bytes()
    # Not before the memory without a compiler is known: this import loads much of it.
    from torch._inductor.utils import fresh_cache

    # In the user's own cache: what the compiler finds out here about the processor, it keeps.
    host = _compiled_pass_seconds(watch)
    with fresh_cache():
        start = time.perf_counter()
        parts = _Compiled()
        seconds = time.perf_counter() - start
        held = resident_memory_bytes() - before
    set_memory_limit(None)
    return CompileCosts(
        runtime_bytes=before,
        compiler_bytes=max(0, held),
        compile_seconds=seconds,
        compiled_pass_seconds=host,
        op_rates=tuple(parts.rates(watch)),
    )


def _run_eagerly(watch: Stopwatch) -> None:
    """Loads what the first step of a run loads: products, attention, passes, the optimizer."""
    for name in _LIBRARIES:
        import_module(name)
    # A model is laid out without weights before it runs; torch loads its tracing for that.
    nn.Embedding(8, 8, device="meta")
    layer_overhead_seconds(watch, 0.0)
    master, moment1, moment2, gradient = (torch.zeros(8) for _ in range(4))
    fused_adamw(master, moment1, moment2, gradient, torch.ones(()))
    for dtype in DTYPES.values():
        x = torch.ones(1, 4, 64, 32, dtype=dtype, requires_grad=True)
        torch.autograd.grad(
            functional.scaled_dot_product_attention(x, x, x, is_causal=True).sum(), x
        )
        weight = torch.ones(64, 64, dtype=dtype, requires_grad=True)
        loss = functional.cross_entropy((torch.ones(64, 64, dtype=dtype) @ weight).float(),
                                        torch.zeros(64, dtype=torch.int64))  # fmt: skip
        torch.autograd.grad(loss, weight)


def _compiled_pass_seconds(watch: Stopwatch) -> float:
    """Seconds of one pass of compiled code that does next to nothing."""
    work = torch.compile(_scaled, dynamic=False)
    x = torch.ones(8, 8, requires_grad=True)
    weight = torch.ones(8, requires_grad=True)
    gradient = torch.ones(8, 8)
    return watch.seconds(lambda: torch.autograd.grad(work(x, weight), (x, weight), gradient)) / 2


def _scaled(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight


_PARTS = (
    _Part("bfloat16", "_log_softmax", "_log_softmax_backward_data", _VOCABULARY, 512, 1, 2),
    _Part("float32", "_log_softmax", "_log_softmax_backward_data", _VOCABULARY, 512, 1, 2),
    _Part("bfloat16", "native_layer_norm", "native_layer_norm_backward", _WIDTH, 2048, 2, 3),
    _Part("bfloat16", "gelu", "gelu_backward", 4 * _WIDTH, 2048, 2, 3),
)
"""Bytes are counted as `capture` counts those of a compiled layer."""

_FEW = 4
"""Rows of the parts that are not being measured."""


def _all_parts(
    scores: Tensor, wide_scores: Tensor, x: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor,
    *targets: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """What layers are made of besides products, in the order of `_PARTS`."""
    return (
        functional.cross_entropy(scores.float(), targets[0]),
        functional.cross_entropy(wide_scores, targets[1]),
        functional.layer_norm(x, (_WIDTH,), weight, bias),
        functional.gelu(hidden, approximate="tanh"),
    )


class _Feed(NamedTuple):
    """What the compiled graph takes, forward and backward."""

    inputs: list[Tensor]
    gradients: list[Tensor]


class _Compiled:
    """All parts as one compiled graph: a compiler takes half as long for one graph as for four.

    Rows are left open, so that one part at a time can be made large enough to be measured.
    """

    def __init__(self) -> None:
        self._work = torch.compile(_all_parts)
        self._both(_feed([part.rows for part in _PARTS]))

    def rates(self, watch: Stopwatch) -> Iterator[OpRate]:
        """Rates of compiled runs under the name of their slowest op."""
        few = _feed([_FEW for _ in _PARTS])
        least_there, least = (watch.seconds(partial(work, few)) for work in (self._go, self._both))
        for index, part in enumerate(_PARTS):
            feed = _feed([part.rows if index == at else _FEW for at in range(len(_PARTS))])
            there = watch.seconds(partial(self._go, feed))
            both = watch.seconds(partial(self._both, feed))
            ahead = max(there - least_there, 0.5 * there)
            back = max(both - there - (least - least_there), 0.1 * both)
            nbytes = part.rows * part.width * PRECISION_BYTES[part.precision]
            for name, moved, taken in (
                (part.forward, part.forward_times * nbytes, ahead),
                (part.backward, part.backward_times * nbytes, back),
            ):
                curve = Curve(points=(Point(moved, moved / taken),))
                yield OpRate(name=name, precision=part.precision, compiled=True, curve=curve)

    def _go(self, feed: _Feed) -> tuple[Tensor, ...]:
        return self._work(*feed.inputs)

    def _both(self, feed: _Feed) -> None:
        wanted = [x for x in feed.inputs if x.requires_grad]
        torch.autograd.grad(self._go(feed), wanted, feed.gradients)


def _feed(rows: list[int]) -> _Feed:
    """Inputs of so many rows for each part, which the compiler leaves open."""
    parts = [
        torch.randn(count, part.width).to(DTYPES[part.precision]).requires_grad_()
        for part, count in zip(_PARTS, rows, strict=True)
    ]
    targets = [torch.zeros(count, dtype=torch.int64) for count in rows[:2]]
    for tensor in (*parts, *targets):
        torch._dynamo.mark_dynamic(tensor, 0)  # noqa: SLF001
    shared = [torch.ones(_WIDTH, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
    losses = [torch.ones(()) for _ in targets]
    gradients = [*losses, *(torch.ones_like(part) for part in parts[2:])]
    return _Feed([*parts, *shared, *targets], gradients)


if __name__ == "__main__":
    main()
