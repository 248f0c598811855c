"""Measures the rates of element-wise ops, the optimizer, norms and the cost of starting an op."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.func import functional_call
from torch.nn import functional
from torch.optim.adamw import adamw
from torch.utils._python_dispatch import TorchDispatchMode

from windlass.hardware.probe.matmul import DTYPES
from windlass.hardware.probe.operands import random_numbers
from windlass.hardware.probe.stopwatch import Stopwatch
from windlass.schema import (
    MOMENT_BLOCK,
    PRECISION_BYTES,
    Curve,
    MomentFormat,
    MomentRate,
    OpRate,
    Point,
    Precision,
)
from windlass.torch_ext import (
    PART_ELEMENTS,
    MomentCodec,
    StoredMoment,
    device_for,
    dither_key,
)

_aten = torch.ops.aten

_PLAIN_ELEMENTS = (2**13, 2**16, 2**19, 2**22, 2**25)
_UPDATE_ELEMENTS = 2**25
"""Weights in the measured update: their state is larger than any cache."""
_MOMENT_ELEMENTS = 2**24
"""Weights whose moments are decoded and encoded: even 8-bit ones fill a large cache."""
_WIDTH = 768
_ROWS = (128, 2048, 8192)
"""The last are more than a processor's cache."""
_VOCABULARY = 8192
_VOCABULARY_ROWS = (64, 512)
_LAUNCHES = 10
_LAUNCH_TOKENS, _LAUNCH_WIDTH, _LAUNCH_HEADS = 4, 32, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Op:
    """An op at one size, and the bytes that it moves."""

    name: str
    work: Callable[[], object]
    nbytes: int


def elementwise_rates(watch: Stopwatch) -> Curve:
    """Bytes/s of `x + y` into an existing tensor, over the bytes that it moves."""
    points = []
    for elements in _PLAIN_ELEMENTS:
        x, y, z = (torch.ones(elements, device=watch.device) for _ in range(3))
        moved = 3 * 4 * elements
        points.append(Point(moved, moved / watch.seconds(partial(torch.add, x, y, out=z))))
    return Curve(points=tuple(points))


def op_rates(
    precision: Precision, watch: Stopwatch, on_measured: Callable[[], None]
) -> tuple[OpRate, ...]:
    """Rates of the single ops that transformers use."""
    points: dict[str, list[Point]] = {}
    for rows in _ROWS:
        for op in (*_layer_ops(rows, precision, watch.device), *_loss_ops(rows, precision, watch)):
            rate = op.nbytes / watch.seconds(op.work)
            points.setdefault(op.name, []).append(Point(op.nbytes, rate))
            on_measured()
    return tuple(
        OpRate(name=name, precision=precision, curve=Curve(points=tuple(rates)))
        for name, rates in points.items()
    )


def update_rate(watch: Stopwatch) -> float:
    """Bytes/s of fused AdamW, which reads four tensors and writes three of them."""
    master, moment1, moment2, gradient = (
        torch.zeros(_UPDATE_ELEMENTS, device=watch.device) for _ in range(4)
    )
    steps = torch.ones((), device=watch.device)
    seconds = watch.seconds(lambda: fused_adamw(master, moment1, moment2, gradient, steps))
    return 7 * 4 * _UPDATE_ELEMENTS / seconds


def mixed_update_rate(watch: Stopwatch) -> float:
    """Bytes/s of fused AdamW with bfloat16 gradients and weights, in pieces as a run does it."""
    piece = device_for(watch.device).piece_elements
    state = [
        torch.split(torch.zeros(_UPDATE_ELEMENTS, device=watch.device), piece) for _ in range(3)
    ]
    low = [
        torch.split(torch.zeros(_UPDATE_ELEMENTS, device=watch.device, dtype=torch.bfloat16), piece)
        for _ in range(2)
    ]
    buffer = torch.empty(piece, device=watch.device)
    steps = torch.ones((), device=watch.device)

    def update() -> None:
        for master, moment1, moment2, gradient, weight in zip(*state, *low, strict=True):
            fused_adamw(master, moment1, moment2, buffer.copy_(gradient), steps)
            weight.copy_(master)

    return (6 * 4 + 2 * 2) * _UPDATE_ELEMENTS / watch.seconds(update)


def moment_rates(watch: Stopwatch) -> tuple[MomentRate, ...]:
    """Rate at which the moments of parameters are decoded and encoded again, in each format."""
    codec = MomentCodec(watch.device)
    return tuple(
        MomentRate(
            moments=moments,
            elements=_MOMENT_ELEMENTS / _recode_seconds(moments, _MOMENT_ELEMENTS, codec, watch),
            part_seconds=_recode_seconds(moments, MOMENT_BLOCK, codec, watch),
        )
        for moments in ("bfloat16", "int8")
    )


def _recode_seconds(
    moments: MomentFormat, elements: int, codec: MomentCodec, watch: Stopwatch
) -> float:
    first, second = (
        StoredMoment.zeros(moments, which, (elements,), watch.device) for which in (0, 1)
    )
    values = torch.linspace(-1e-3, 1e-3, elements, device=watch.device)
    codec.encode_all((values, values.square()), (first, second), seed=0, step=1, weight="")

    def recode() -> None:
        for part, start in enumerate(range(0, elements, PART_ELEMENTS)):
            count = min(PART_ELEMENTS, elements - start)
            stored = (first.narrow(start, count), second.narrow(start, count))
            codec.encode(codec.decode(stored), stored, dither_key(0, 1, "", part))

    return watch.seconds(recode)


def update_call_seconds(watch: Stopwatch) -> float:
    """Seconds of one call of fused AdamW on eight elements: the cost of the call itself."""
    master, moment1, moment2, gradient = (torch.zeros(8, device=watch.device) for _ in range(4))
    steps = torch.ones((), device=watch.device)
    # A run passes a copy of the step count, because the call increments it.
    return watch.seconds(lambda: fused_adamw(master, moment1, moment2, gradient, steps.clone()))


def fused_adamw(
    master: Tensor, moment1: Tensor, moment2: Tensor, gradient: Tensor, steps: Tensor
) -> None:
    """One step of torch's fused AdamW."""
    adamw(
        [master], [gradient], [moment1], [moment2], [], [steps], fused=True, amsgrad=False,
        beta1=0.9, beta2=0.95, lr=1e-4, weight_decay=0.1, eps=1e-8, maximize=False,
    )  # fmt: skip


def norm_rate(watch: Stopwatch) -> float:
    """Bytes/s of the 2-norm of float32 gradients, as a run computes it."""
    return _norm_rate(torch.ones(_UPDATE_ELEMENTS, device=watch.device), watch)


def mixed_norm_rate(watch: Stopwatch) -> float:
    """Bytes/s of the 2-norm of bfloat16 gradients, which a CPU converts to float32 first."""
    ones = torch.ones(_UPDATE_ELEMENTS, device=watch.device, dtype=torch.bfloat16)
    return _norm_rate(ones, watch)


def _norm_rate(gradient: Tensor, watch: Stopwatch) -> float:
    device = device_for(watch.device)
    pieces = gradient.split(device.piece_elements)
    buffer = torch.empty(device.piece_elements, device=watch.device)

    def norm() -> object:
        if device.is_asynchronous:
            return torch._foreach_norm([gradient], 2, dtype=torch.float32)  # noqa: SLF001
        if gradient.dtype == torch.float32:
            return [torch.linalg.vector_norm(piece) for piece in pieces]
        return [torch.linalg.vector_norm(buffer.copy_(piece)) for piece in pieces]

    return gradient.nbytes / watch.seconds(norm)


def launch_seconds(watch: Stopwatch) -> float:
    """Seconds of one op with next to no work: the mean of those of transformer blocks.

    Products, norms and attention take several times as long to launch as a sum of a few elements.
    """
    block = _SmallBlock().to(watch.device)
    weights = list(block.parameters())
    x = torch.ones(1, _LAUNCH_TOKENS, _LAUNCH_WIDTH, device=watch.device, requires_grad=True)
    gradient = torch.ones_like(x)

    def blocks() -> None:
        y = x
        for _ in range(_LAUNCHES):
            y = block(y)
        torch.autograd.grad(y, [x, *weights], gradient)

    return watch.seconds(blocks) / _calls_of(blocks)


def layer_overhead_seconds(watch: Stopwatch, launch: float) -> float:
    """Seconds of one pass of a block beyond its ops: the functional call and the autograd graph.

    Args:
        launch: seconds of one op, as `launch_seconds` returns them.
    """
    block = _SmallBlock().to(watch.device)
    weights = {name: weight.detach() for name, weight in block.named_parameters()}
    x = torch.ones(1, _LAUNCH_TOKENS, _LAUNCH_WIDTH, device=watch.device)

    def forward_and_backward() -> None:
        used = {name: weight.requires_grad_() for name, weight in weights.items()}
        y = functional_call(block, used, (x.detach().requires_grad_(),))
        torch.autograd.grad(y, [*used.values()], x)

    launches = _calls_of(forward_and_backward) * launch
    return max(0.0, watch.seconds(forward_and_backward) - launches) / 2


class _SmallBlock(nn.Module):
    """A transformer's block with the usual twelve weights, and next to no work."""

    def __init__(self) -> None:
        super().__init__()
        width = _LAUNCH_WIDTH
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.input, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """`[1 s c]` to the same."""
        heads = (*x.shape[:2], _LAUNCH_HEADS, -1)
        parts = self.input(self.norms[0](x)).split(x.shape[2], 2)
        query, key, value = (part.reshape(heads).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        y: Tensor = x + self.down(functional.gelu(self.up(self.norms[1](x))))
        return y


def _calls_of(work: Callable[[], None]) -> int:
    """How many ATen calls it makes that make a tensor, and not only another view of one."""
    calls = _CallCount()
    with calls:
        work()
    return int(calls.count)


class _CallCount(TorchDispatchMode):
    """Counts ATen calls that make a tensor, and not only another view of one."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401  whatever ATen takes and gives
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def _layer_ops(rows: int, precision: Precision, device: torch.device) -> Iterator[_Op]:
    size, dtype = PRECISION_BYTES[precision], DTYPES[precision]
    x, y = (random_numbers(rows, _WIDTH, dtype=dtype, device=device) for _ in range(2))
    wide = random_numbers(rows, 4 * _WIDTH, dtype=dtype, device=device)
    weight, bias = (torch.ones(_WIDTH, device=device, dtype=dtype) for _ in range(2))
    _, mean, rstd = torch.native_layer_norm(x, (_WIDTH,), weight, bias, 1e-5)
    n = rows * _WIDTH * size
    norm_args = (y, x, [_WIDTH], mean, rstd, weight, bias, [True, True, True])
    works: tuple[tuple[str, Callable[[], object], int], ...] = (
        ("native_layer_norm", lambda: _aten.native_layer_norm(x, [_WIDTH], weight, bias, 1e-5), 2),
        ("native_layer_norm_backward", lambda: _aten.native_layer_norm_backward(*norm_args), 3),
        ("gelu", lambda: _aten.gelu(wide, approximate="tanh"), 8),
        ("gelu_backward", lambda: _aten.gelu_backward(wide, wide, approximate="tanh"), 12),
        ("silu", lambda: _aten.silu(wide), 8),
        ("silu_backward", lambda: _aten.silu_backward(wide, wide), 12),
        ("add", lambda: x + y, 3),
        ("mul", lambda: x * y, 3),
        ("sum", lambda: wide.sum(0, keepdim=True), 4),
        ("cat", lambda: torch.cat([x, y, x], 1), 6),
        ("clone", x.clone, 2),
    )
    for name, work, passes in works:
        yield _Op(name=name, work=work, nbytes=passes * n)


def _loss_ops(rows: int, precision: Precision, watch: Stopwatch) -> Iterator[_Op]:
    """The ops of loss and embedding; cross-entropy runs in float32 whatever the logits are in."""
    rows, device, dtype = rows // 4, watch.device, DTYPES[precision]
    logits = random_numbers(rows, _VOCABULARY, dtype=torch.float32, device=device)
    low_precision = logits.to(dtype)
    log_probabilities = torch.log_softmax(logits, 1)
    targets = torch.randint(0, _VOCABULARY, (rows,), device=device)
    table = random_numbers(_VOCABULARY, 192, dtype=dtype, device=device)
    gradient = random_numbers(rows, 192, dtype=dtype, device=device)
    one, count = torch.ones((), device=device), torch.tensor(float(rows), device=device)
    n, size = 4 * logits.numel(), PRECISION_BYTES[precision]
    embedded_bytes = rows * 192 * size
    works: tuple[tuple[str, Callable[[], object], int], ...] = (
        ("_log_softmax", lambda: _aten._log_softmax(logits, 1, False), 2 * n),  # noqa: SLF001
        (
            "_log_softmax_backward_data",
            lambda: _aten._log_softmax_backward_data(logits, log_probabilities, 1, torch.float32),  # noqa: SLF001
            3 * n,
        ),
        ("nll_loss_backward", lambda: _nll_backward(one, log_probabilities, targets, count), n),
        ("embedding", lambda: _aten.embedding(table, targets), 2 * embedded_bytes),
        (
            "embedding_dense_backward",
            lambda: _aten.embedding_dense_backward(gradient, targets, _VOCABULARY, -1, False),
            embedded_bytes + table.numel() * size,
        ),
    )
    for name, work, nbytes in works:
        yield _Op(name=name, work=work, nbytes=nbytes)
    if dtype != torch.float32:
        cast_bytes = 2 * logits.numel() * (4 + size)
        yield _Op(
            name="_to_copy",
            work=lambda: [low_precision.float(), logits.to(dtype)],
            nbytes=cast_bytes,
        )


def _nll_backward(one: Tensor, log_probabilities: Tensor, targets: Tensor, count: Tensor) -> object:
    return _aten.nll_loss_backward(one, log_probabilities, targets, None, 1, -100, count)
