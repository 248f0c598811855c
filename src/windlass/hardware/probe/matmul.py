"""Measures the rates of matrix products and fused attention on this device."""

from collections.abc import Callable
from itertools import cycle

import torch
from torch.nn.functional import scaled_dot_product_attention

from windlass.hardware.probe.stopwatch import Stopwatch
from windlass.schema import PRECISION_BYTES, AttentionRate, Curve, MatmulRate, Point, Precision

DTYPES: dict[Precision, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_SHAPES = (
    (64, 64, 64), (128, 192, 192), (512, 192, 192), (1024, 576, 192), (2048, 768, 192),
    (1024, 768, 768), (2048, 3072, 768), (256, 32768, 768),
)  # fmt: skip
"""(m, n, k) of products in transformers: tokens, outputs and inputs; the last is a model's head."""

_ACCELERATOR_SHAPES = (*_SHAPES, (8192, 8192, 8192))

_COLD_BYTES = 2**26
"""Bytes of the weights and results of one measurement together: more than a processor's cache."""

_SEQUENCES = (128, 256, 512, 768, 1024)
_HEAD_WIDTHS = (32, 64, 128)
_TOKENS = 2048
_WIDTH = 512
"""Number of heads times head width in the attention that is measured."""


def matmul_rates(
    precision: Precision, watch: Stopwatch, on_measured: Callable[[], None]
) -> MatmulRate:
    """Rates of matrix products and attention in one precision.

    A product is measured as training runs it: once forward (`x W^T`) and twice backward
    (`g W`, `g^T x`). Its rate is the mean over the three.

    Args:
        precision: precision of all operands.
        watch: times the work.
        on_measured: called after each measurement.
    """
    shapes = _SHAPES if watch.device.type == "cpu" else _ACCELERATOR_SHAPES
    plain, biased = [], []
    for m, n, k in shapes:
        point, with_bias = _matmul_rate(m, n, k, precision, watch)
        plain.append(point)
        biased.append(with_bias)
        on_measured()
    plain.sort()
    biased.sort()
    widths = tuple(_attention(width, precision, watch, on_measured) for width in _HEAD_WIDTHS)
    typical = widths[1].forward
    return MatmulRate(
        precision=precision,
        peak=max(point.rate for point in plain),
        curve=Curve(points=tuple(plain)),
        biased=Curve(points=tuple(biased)),
        attention=Curve(
            points=tuple(
                Point(4 * _TOKENS * _WIDTH * sequence, rate) for sequence, rate in typical.points
            )
        ),
        attention_rates=widths,
    )


def _matmul_rate(
    m: int, n: int, k: int, precision: Precision, watch: Stopwatch
) -> tuple[Point, Point]:
    """The rate of a product, and the rate of its forward pass with a bias."""
    copies = 1
    if watch.device.type == "cpu":
        copies = max(1, _COLD_BYTES // (PRECISION_BYTES[precision] * (n * k + m * n)))
    x, weight, gradient = (
        torch.randn(rows, columns, device=watch.device).to(DTYPES[precision])
        for rows, columns in ((m, k), (n, k), (m, n))
    )
    bias = torch.zeros(n, device=watch.device, dtype=weight.dtype)
    weights, inputs, gradients = (
        cycle([like.clone() for _ in range(copies)]) for like in (weight, x, gradient)
    )
    # In training the left factor is still in the cache; weights and results are not.
    works = (
        lambda: torch.mm(x, next(weights).t(), out=next(gradients)),
        lambda: torch.mm(gradient, next(weights), out=next(inputs)),
        lambda: torch.mm(gradient.t(), next(inputs), out=next(weights)),
        lambda: torch.addmm(bias, x, next(weights).t(), out=next(gradients)),
    )
    *seconds, with_bias = (watch.seconds(work) for work in works)
    flop = 2.0 * m * n * k
    return Point(flop, flop * len(seconds) / sum(seconds)), Point(flop, flop / with_bias)


def _attention(
    width: int, precision: Precision, watch: Stopwatch, on_measured: Callable[[], None]
) -> AttentionRate:
    """Rates of one head width: the typical width at all sequence lengths, others at two."""
    lengths = _SEQUENCES if width == _HEAD_WIDTHS[1] else (_SEQUENCES[1], _SEQUENCES[-1])
    forward, backward = [], []
    for sequence in lengths:
        forward_rate, backward_rate = _attention_rate(width, sequence, precision, watch)
        forward.append(Point(sequence, forward_rate))
        backward.append(Point(sequence, backward_rate))
        on_measured()
    return AttentionRate(
        head_width=width,
        forward=Curve(points=tuple(forward)),
        backward=Curve(points=tuple(backward)),
    )


def _attention_rate(
    width: int, sequence: int, precision: Precision, watch: Stopwatch
) -> tuple[float, float]:
    """FLOP/s forward and backward; the backward count includes the recomputed scores."""
    heads, batch = _WIDTH // width, _TOKENS // sequence
    shape = (batch, sequence, heads, width)
    query, key, value = (
        torch.randn(shape, device=watch.device).to(DTYPES[precision]).transpose(1, 2)
        .requires_grad_()
        for _ in range(3)
    )  # fmt: skip
    gradient = torch.randn(shape, device=watch.device).to(DTYPES[precision]).transpose(1, 2)
    inputs = (query, key, value)
    output = scaled_dot_product_attention(query, key, value, is_causal=True)
    forward = watch.seconds(lambda: scaled_dot_product_attention(query, key, value, is_causal=True))
    backward = watch.seconds(
        lambda: torch.autograd.grad(output, inputs, gradient, retain_graph=True)
    )
    flop = 4.0 * batch * heads * sequence**2 * width
    return flop / forward, 2.5 * flop / backward
