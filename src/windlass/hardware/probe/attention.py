"""Measures attention on this device: by kernel, head width, length of sequences and mask."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from windlass.hardware.probe.operands import random_numbers
from windlass.hardware.probe.stopwatch import Stopwatch
from windlass.models import attend
from windlass.schema import (
    HEAD_PARTS,
    TYPICAL_HEAD_WIDTH,
    AttentionBackend,
    AttentionRate,
    Curve,
    MachinePart,
    OtherAttention,
    Point,
)

_FEW_THREADS = 4
"""Threads for which half the heads are work enough; it takes half the time."""

_COMPILED_SEQUENCE = 512
"""The length at which it is measured compiled."""
_ROUNDS = 3
"""Times that compiled and eager attention are measured in turn; the median ratio counts."""


class AttentionSizes(NamedTuple):
    """What is measured on one kind of device."""

    tokens: int
    width: int
    """Number of heads times head width."""
    sequences: tuple[int, ...]
    most_rows: int
    """Most heads times length: narrow heads are seldom long, and would take most of the time."""
    backends: tuple[AttentionBackend, ...]


_ON_CPU = AttentionSizes(
    2048, 512, (16, 64, 128, 256, 512, 1024, 2048), 2**15,
    ("flash", "math"),
)  # fmt: skip
_CONVERTED_ON_CPU = AttentionSizes(256, 128, (64, 256), 2**15, ("flash", "math"))
_ON_ACCELERATOR = AttentionSizes(
    8192, 2048, (512, 1024, 2048, 4096, 8192), 2**18,
    ("flash", "cudnn", "efficient", "math"),
)  # fmt: skip


class AttentionWay(NamedTuple):
    """Heads of one width, under a mask or none."""

    head_width: int
    is_causal: bool = True


ATTENTION_WAYS: dict[MachinePart, AttentionWay] = {
    **{part: AttentionWay(width) for width, part in HEAD_PARTS.items()},
    "attention without a mask": AttentionWay(TYPICAL_HEAD_WIDTH, is_causal=False),
}
"""What each part of a machine says of attention; other parts say nothing."""

WAY_MEASUREMENTS = 56
"""Measurements of one way on a CPU, about, in all precisions."""

ACCELERATOR_WAYS = tuple(
    way for way in ATTENTION_WAYS.values() if way.head_width >= TYPICAL_HEAD_WIDTH
)
"""What is measured of an accelerator, all at once."""


def attention_sizes(device: torch.device, *, is_converted: bool = False) -> AttentionSizes:
    """What is measured on a device.

    Args:
        is_converted: whether the processor converts the data type to float32 first.
    """
    if device.type != "cpu":
        return _ON_ACCELERATOR
    if is_converted:
        return _CONVERTED_ON_CPU
    if torch.get_num_threads() > _FEW_THREADS:
        return _ON_CPU
    width, rows = _ON_CPU.width // 2, _ON_CPU.most_rows // 2
    return _ON_CPU._replace(width=width, most_rows=rows)


def attention_rates(
    dtype: torch.dtype,
    sizes: AttentionSizes,
    ways: Sequence[AttentionWay],
    watch: Stopwatch,
    on_measured: Callable[[], None],
) -> tuple[AttentionRate, ...]:
    """Rates of attention in one data type, by every kernel that the device has for it."""
    return tuple(
        rate
        for backend, (width, is_causal) in product(sizes.backends, ways)
        for rate in _rate(
            partial(attend, is_causal=is_causal, backend=backend), sizes, width, dtype, watch,
            on_measured,
        )
    )  # fmt: skip


class CompiledSpeed(NamedTuple):
    """How many times as fast compiled plain attention is."""

    forward: float
    backward: float


def compiled_speed(dtype: torch.dtype, watch: Stopwatch) -> CompiledSpeed:
    """How many times as fast plain attention is compiled, at one length; compiling takes seconds.

    Both are measured in turn, because a shared machine is slow for seconds at a time.
    """
    sizes = attention_sizes(watch.device)
    compiled = torch.compile(attend, dynamic=False)
    ratios = []
    for _ in range(_ROUNDS):
        fast, plain = (
            _rates_at(
                partial(run, is_causal=True, backend="math"),
                sizes, TYPICAL_HEAD_WIDTH, _COMPILED_SEQUENCE, dtype, watch,
            )
            for run in (compiled, attend)
        )  # fmt: skip
        ratios.append((fast[0] / plain[0], fast[1] / plain[1]))
    forward, backward = (statistics.median(each) for each in zip(*ratios, strict=True))
    return CompiledSpeed(forward, backward)


def compiled_rates(rates: Sequence[AttentionRate], speed: CompiledSpeed) -> Iterator[AttentionRate]:
    """The rates of compiled plain attention, at the one length at which it was compiled.

    Args:
        rates: what `attention_rates` measured.
        speed: how many times as fast it is compiled.
    """
    for rate in rates:
        if (rate.head_width, rate.attention, rate.is_causal) == (TYPICAL_HEAD_WIDTH, "math", True):
            forward, backward = (
                Curve(points=(Point(_COMPILED_SEQUENCE, times * at(_COMPILED_SEQUENCE)),))
                for times, at in zip(speed, (rate.forward.at, rate.backward.at), strict=True)
            )
            yield rate.model_copy(
                update={"compiled": True, "forward": forward, "backward": backward}
            )


def typical_rates(rates: Sequence[AttentionRate], sizes: AttentionSizes) -> Curve | None:
    """FLOP/s of the fused kernel forward over FLOP of one call; None if nothing was measured."""
    fused = [each for each in rates if each.attention is None and each.is_causal]
    if not fused:
        return None
    typical = min(fused, key=lambda each: abs(each.head_width - TYPICAL_HEAD_WIDTH)).forward
    flop = 4 * sizes.tokens * sizes.width
    return Curve(points=tuple(Point(flop * sequence, rate) for sequence, rate in typical.points))


def _rate(
    work: "partial[Tensor]",
    sizes: AttentionSizes,
    head_width: int,
    dtype: torch.dtype,
    watch: Stopwatch,
    on_measured: Callable[[], None],
) -> Iterator[AttentionRate]:
    """The rates of one head width, up to the longest sequence that fits the device's memory.

    There are none if the device has no such kernel.
    """
    forward, backward = [], []
    heads = sizes.width // head_width
    for sequence in (s for s in sizes.sequences if s * heads <= sizes.most_rows):
        try:
            rates = _rates_at(work, sizes, head_width, sequence, dtype, watch)
        except torch.OutOfMemoryError:
            break
        except RuntimeError as error:
            if "kernel" not in str(error):
                raise
            return
        forward.append(Point(sequence, rates[0]))
        backward.append(Point(sequence, rates[1]))
        on_measured()
    if not forward:
        return
    yield AttentionRate(
        head_width=head_width,
        attention=other_attention(work.keywords["backend"]),
        is_causal=work.keywords["is_causal"],
        forward=Curve(points=tuple(forward)),
        backward=Curve(points=tuple(backward)),
    )


def other_attention(backend: AttentionBackend) -> OtherAttention | None:
    """How a plan names a backend: None for `flash`."""
    return None if backend == "flash" else backend


def _rates_at(
    work: "partial[Tensor]",
    sizes: AttentionSizes,
    head_width: int,
    sequence: int,
    dtype: torch.dtype,
    watch: Stopwatch,
) -> tuple[float, float]:
    """FLOP/s forward and backward; the backward count includes the recomputed scores."""
    heads, batch = sizes.width // head_width, sizes.tokens // sequence
    inputs = attention_inputs((batch, sequence, heads, head_width), dtype, watch.device)
    gradient = torch.ones_like(inputs[0])
    output = work(*inputs)
    forward = watch.seconds(lambda: work(*inputs))
    backward = watch.seconds(
        lambda: torch.autograd.grad(output, inputs, gradient, retain_graph=True)
    )
    flop = 4.0 * batch * heads * sequence**2 * head_width
    return flop / forward, 2.5 * flop / backward


def attention_inputs(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Queries, keys and values `[b h s k]` as a layer has them: as views of one projection.

    Args:
        shape: `(b, s, h, k)`.
    """
    batch, sequence, heads, width = shape
    joint = random_numbers(batch, sequence, 3, heads, width, dtype=dtype, device=device)
    return [part.transpose(1, 2).detach().requires_grad_() for part in joint.unbind(2)]
