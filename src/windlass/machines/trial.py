"""Trial: a fresh process that runs a little eagerly, then compiled, and prints what that takes.

Run as `python -m windlass.machines.trial`; it prints one `Trial` as JSON. A process of its own,
because compiling fills memory that the measured process would never give back.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module

import torch
from torch import Tensor, nn
from torch.nn import functional

from windlass.document import Document
from windlass.errors import MachineError
from windlass.machines.allocator import keep_blocks, prepare_allocator
from windlass.machines.arithmetic import DTYPES
from windlass.machines.surroundings import process_bytes
from windlass.machines.timing import Stopwatch
from windlass.machines.traffic import fused_adamw, layer_seconds
from windlass.spec.graph import PRECISION_BYTES, Precision
from windlass.spec.machine import Curve, OpRate, Point

_ROWS = 2048
_WIDTH = 768
_VOCABULARY = 8192
_BUDGET_SECONDS = 0.06
_LIBRARIES = ("cyclopts", "rich.live", "rich.table", "tokenizers")
"""What a run loads beside torch, and so holds."""


class Trial(Document):
    """What a fresh process held and took."""

    runtime_bytes: int
    """Before any large tensor, having run both precisions."""
    compiler_bytes: int
    """On top, after compiling."""
    compile_seconds: float
    """Of one kind of layer."""
    compiled_pass_seconds: float
    op_rates: tuple[OpRate, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """A function to compile, with the ATen names that it stands for and the bytes they move."""

    precision: Precision
    work: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    gradient: Tensor
    forward: tuple[str, int]
    backward: tuple[str, int]


def run_trial() -> Trial:
    """The result of a trial in a process of its own.

    Raises:
        MachineError: it ended with an error, which the message holds.
    """
    done = subprocess.run(
        (sys.executable, "-m", "windlass.machines.trial"),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise MachineError(f"compiled code cannot be measured here: {' '.join(last)}")
    return Trial.model_validate_json(done.stdout.splitlines()[-1])


def main() -> None:
    """Prints the trial of this process."""
    prepare_allocator()
    sys.stdout.write(_trial().to_json() + "\n")


def _trial() -> Trial:
    watch = Stopwatch(torch.device("cpu"), budget_seconds=_BUDGET_SECONDS)
    _run_eagerly(watch)
    before = process_bytes()
    # Not before the memory without a compiler is known: this import loads much of it.
    from torch._inductor.utils import fresh_cache

    with fresh_cache():
        host = _compiled_pass_seconds(watch)
        start = time.perf_counter()
        compiled = [_compiled(case) for case in _cases("bfloat16")]
        seconds = time.perf_counter() - start
        held = process_bytes() - before
        compiled += [_compiled(case) for case in _cases("float32", loss_only=True)]
    # Fresh memory is measured and counted apart.
    keep_blocks()
    rates = [rate for each in compiled for rate in _rates(each, watch)]
    return Trial(
        runtime_bytes=before,
        compiler_bytes=max(0, held),
        compile_seconds=seconds,
        compiled_pass_seconds=host,
        op_rates=tuple(rates),
    )


def _run_eagerly(watch: Stopwatch) -> None:
    """Loads what the first step of a run loads: products, attention, passes, the optimizer."""
    for name in _LIBRARIES:
        import_module(name)
    # A model is laid out without weights before it runs; torch loads its tracing for that.
    nn.Embedding(8, 8, device="meta")
    layer_seconds(watch, 0.0)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compiled:
    """A case that has run once, forward and backward."""

    case: _Case
    forward: Callable[[], Tensor]
    both: Callable[[], object]


def _compiled(case: _Case) -> _Compiled:
    forward = partial(torch.compile(case.work, dynamic=False), *case.inputs)
    inputs = [x for x in case.inputs if x.requires_grad]
    both = partial(_both_ways, forward, inputs, case.gradient)
    both()
    return _Compiled(case=case, forward=forward, both=both)


def _both_ways(forward: Callable[[], Tensor], inputs: list[Tensor], gradient: Tensor) -> None:
    torch.autograd.grad(forward(), inputs, gradient)


def _rates(compiled: _Compiled, watch: Stopwatch) -> Iterator[OpRate]:
    """Rates of compiled runs under the name of their slowest op."""
    there = watch.seconds(compiled.forward)
    both = watch.seconds(compiled.both)
    case = compiled.case
    back = max(both - there, 0.1 * both)
    for (name, nbytes), taken in ((case.forward, there), (case.backward, back)):
        curve = Curve(points=(Point(nbytes, nbytes / taken),))
        yield OpRate(name=name, precision=case.precision, compiled=True, curve=curve)


def _cases(precision: Precision, *, loss_only: bool = False) -> Iterator[_Case]:
    dtype, size = DTYPES[precision], PRECISION_BYTES[precision]
    narrow = _ROWS * _WIDTH * size
    logits = _ROWS // 4 * _VOCABULARY * size
    x, wide, scores = (
        torch.randn(rows, columns).to(dtype).requires_grad_()
        for rows, columns in ((_ROWS, _WIDTH), (_ROWS, 4 * _WIDTH), (_ROWS // 4, _VOCABULARY))
    )
    yield _Case(
        precision=precision,
        work=lambda x, y: functional.cross_entropy(x.float(), y),
        inputs=(scores, torch.zeros(_ROWS // 4, dtype=torch.int64)),
        gradient=torch.ones(()),
        forward=("_log_softmax", logits),
        backward=("_log_softmax_backward_data", 2 * logits),
    )
    if loss_only:
        return
    weight, bias = (torch.ones(_WIDTH, dtype=dtype, requires_grad=True) for _ in range(2))
    yield _Case(
        precision=precision,
        work=lambda x, w, b: functional.layer_norm(x, (_WIDTH,), w, b),
        inputs=(x, weight, bias),
        gradient=torch.ones_like(x),
        forward=("native_layer_norm", 2 * narrow),
        backward=("native_layer_norm_backward", 3 * narrow),
    )
    yield _Case(
        precision=precision,
        work=lambda x: functional.gelu(x, approximate="tanh"),
        inputs=(wide,),
        gradient=torch.ones_like(wide),
        forward=("gelu", 8 * narrow),
        backward=("gelu_backward", 12 * narrow),
    )


if __name__ == "__main__":
    main()
