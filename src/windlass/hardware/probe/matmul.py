"""Measures the rates of matrix products on this device."""

import time
from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from windlass.hardware.probe.attention import (
    AttentionWay,
    attention_rates,
    attention_sizes,
    typical_rates,
)
from windlass.hardware.probe.operands import ColdMemory
from windlass.hardware.probe.stopwatch import Stopwatch
from windlass.schema import (
    CACHED_BYTES,
    PRECISION_BYTES,
    Curve,
    MatmulRate,
    Point,
    Precision,
    ProductRate,
    ProductRole,
)
from windlass.torch_ext import Device

DTYPES: dict[Precision, torch.dtype] = {
    "float32": torch.float32, "tf32": torch.float32, "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}  # fmt: skip

_SHAPES = (
    (16, 192, 64), (4, 512, 512), (16, 3072, 768), (32, 128, 128), (64, 1024, 1024),
    (100, 8192, 144), (128, 192, 192), (256, 320, 320), (512, 1536, 512), (1024, 576, 192),
    (1024, 768, 768), (608, 20882, 72), (2048, 768, 192), (1024, 3072, 768), (256, 32768, 64),
    (128, 32768, 768),
)  # fmt: skip
"""(m, n, k) of products in transformers: tokens, outputs and inputs, few and many of each, and
numbers that are no power of two; those with the most outputs are models' heads."""

_FEW_SHAPES = (
    (64, 192, 192), (300, 192, 192), (256, 320, 320), (32, 512, 512), (32, 768, 768),
    (256, 320, 64), (32, 1536, 512), (16, 3072, 768), (8, 9000, 384),
    (32, 16000, 64),
)  # fmt: skip
"""In a precision that the processor converts, which takes up to a hundred times as long."""

_TRIAL_SHAPE = (256, 512, 512)
_TRIALS = 8
_CONVERTED = 3.0
"""How many times as long as in float32 a product takes at least in a converted precision."""

_ACCELERATOR_SHAPES = (*_SHAPES, (8192, 8192, 8192))

_ROLES: tuple[ProductRole, ...] = ("forward", "biased", "input_gradient", "weight_gradient")
_FIT_ROUNDS = 12
_FLOP_TERM = 1
"""Position of the FLOP among the terms of a product's time."""
_SIZE_WEIGHT = 0.25
"""Power of its time with which a measurement counts."""
_OUTLIER = 0.1
"""Relative error beyond which a measurement counts less."""


def probed_precisions(device: Device) -> tuple[Precision, Precision]:
    """The precisions that the planner chooses from on a device: float32, and one of 16 bits."""
    return ("float32", "bfloat16" if device.has_bfloat16() else "float16")


def converted_precisions(device: torch.device) -> frozenset[Precision]:
    """The precisions that this processor has no products for: it converts each to float32 first.

    Training never gains from one, and measuring it in full would take minutes. No accelerator has
    any.
    """
    if device.type != "cpu":
        return frozenset()
    m, n, k = _TRIAL_SHAPE
    least = dict.fromkeys(DTYPES, inf)
    # The first product of a process loads the library and others may disturb some; the shortest of
    # several in turn says what the processor can do.
    for precision in (*DTYPES,) * _TRIALS:
        x, weight = (torch.ones(size, dtype=DTYPES[precision]) for size in ((m, k), (k, n)))
        start = time.perf_counter()
        torch.mm(x, weight)
        least[precision] = min(least[precision], time.perf_counter() - start)
    return frozenset(each for each in DTYPES if least[each] > _CONVERTED * least["float32"])


def matmul_rates(
    precision: Precision,
    watch: Stopwatch,
    on_measured: Callable[[], None],
    *,
    ways: Sequence[AttentionWay] = (),
    is_converted: bool = False,
) -> MatmulRate:
    """Rates of matrix products and attention in one precision.

    A product is measured as training runs it: once forward (`x W^T`) and twice backward
    (`g W`, `g^T x`). Its rate is the mean over the three.

    Args:
        is_converted: whether the processor has no products for it; few are measured then.
    """
    on_cpu = watch.device.type == "cpu"
    shapes: Sequence[tuple[int, int, int]] = _SHAPES if on_cpu else _ACCELERATOR_SHAPES
    if is_converted:
        shapes = _FEW_SHAPES
    measured: list[MeasuredProduct] = []
    memory = ColdMemory(DTYPES[precision], watch.device)
    for m, n, k in shapes:
        measured.append(_measure_product(m, n, k, memory, watch))
        on_measured()
    plain = sorted(Point(each.flop, each.rate) for each in measured)
    biased = sorted(Point(each.flop, each.flop / each.seconds["biased"]) for each in measured)
    sizes = attention_sizes(watch.device, is_converted=is_converted)
    attention = attention_rates(DTYPES[precision], sizes, ways, watch, on_measured)
    itemsize = PRECISION_BYTES[precision]
    products = [fit_product(role, measured, itemsize) for role in _ROLES] if on_cpu else []
    if is_converted:
        products[_ROLES.index("input_gradient")] = _rate_by_weights("input_gradient", measured)
    curve = Curve(points=tuple(plain))
    return MatmulRate(
        precision=precision,
        peak=max(point.rate for point in plain),
        curve=curve,
        products=tuple(products),
        biased=Curve(points=tuple(biased)),
        attention=typical_rates(attention, sizes) or curve,
        attention_rates=attention,
    )


class MeasuredProduct(NamedTuple):
    """Measured seconds of a layer's products, by role: (m, k) inputs, (n, k) weights."""

    m: int
    n: int
    k: int
    seconds: dict[ProductRole, float]

    @property
    def flop(self) -> float:
        """FLOP of each of them."""
        return 2.0 * self.m * self.n * self.k

    @property
    def rate(self) -> float:
        """FLOP/s of a pass forward and the two backward."""
        return self.flop * 3 / sum(t for role, t in self.seconds.items() if role != "biased")

    def moved(self, role: ProductRole, itemsize: int) -> tuple[int, int]:
        """Bytes of the factors that come from memory, and of the result."""
        weights, inputs, outputs = (
            itemsize * count for count in (self.n * self.k, self.m * self.k, self.m * self.n)
        )
        if role == "weight_gradient":
            return inputs + outputs, weights
        if role == "input_gradient":
            return weights + max(0, outputs - CACHED_BYTES), inputs
        return weights, outputs


def _measure_product(
    m: int, n: int, k: int, memory: ColdMemory, watch: Stopwatch
) -> MeasuredProduct:
    weights, inputs = memory.tensors(n, k), memory.tensors(m, k)
    # In training the left factor is still in the cache; weights and saved inputs are not.
    x, gradient = next(inputs).clone(), next(memory.tensors(m, n)).clone()
    bias = gradient[0].clone()
    works: dict[ProductRole, Callable[[], object]] = {
        "forward": lambda: torch.mm(x, next(weights).t()),
        "input_gradient": lambda: torch.mm(gradient, next(weights)),
        "weight_gradient": lambda: torch.mm(gradient.t(), next(inputs)),
        "biased": lambda: torch.addmm(bias, x, next(weights).t()),
    }
    return MeasuredProduct(m, n, k, {role: watch.seconds(work) for role, work in works.items()})


def fit_product(
    role: ProductRole, measured: Sequence[MeasuredProduct], itemsize: int
) -> ProductRate:
    """The times of one role.

    Args:
        measured: products of at least four shapes.
    """
    timed = [
        TimedProduct(each.flop, *each.moved(role, itemsize), each.seconds[role])
        for each in measured
    ]
    return ProductRate(role=role, **fit_terms(timed)._asdict())


def _rate_by_weights(role: ProductRole, measured: Sequence[MeasuredProduct]) -> ProductRate:
    """The times of a role whose kernel is the slower, the larger the weight is.

    For an input gradient in a precision that it converts, torch multiplies columns of the weight,
    one by one on one thread (`gemm_notrans_` of its `BlasKernel.cpp`).
    """
    by_size: dict[int, list[MeasuredProduct]] = {}
    for each in measured:
        by_size.setdefault(each.n * each.k, []).append(each)
    points = tuple(
        Point(size, sum(each.flop for each in those) / sum(each.seconds[role] for each in those))
        for size, those in sorted(by_size.items())
    )
    fastest = max(point.rate for point in points)
    return ProductRate(
        role=role, call_seconds=0.0, flop_rate=fastest, by_weights=Curve(points=points)
    )


class TimedProduct(NamedTuple):
    """What a product computes and moves, and how long it took."""

    flop: float
    read_bytes: float
    written_bytes: float
    seconds: float


def _spare_term(used: Sequence[int], shares: Tensor) -> int:
    """Position of the term to leave out, where one is not positive; never that of the FLOP.

    On a busy machine another term may take all of the FLOP's time: then it is that one.

    Args:
        shares: time that each takes in the measurements together, `Float64[term]`.
    """
    others = [position for position, term in enumerate(used) if term != _FLOP_TERM]
    least = min(others, key=lambda position: float(shares[position]))
    if shares[least] <= 0:
        return least
    return max(others, key=lambda position: float(shares[position]))


class ProductTerms(NamedTuple):
    """Terms of a product's time, as `ProductRate` states them."""

    call_seconds: float
    flop_rate: float
    read: float | None
    write: float | None


def fit_terms(timed: Sequence[TimedProduct]) -> ProductTerms:
    """The terms that fit best: least squares of relative errors, outliers less, none below zero.

    Args:
        timed: at least four products.
    """
    measured = torch.tensor(timed, dtype=torch.float64)
    seconds = measured[:, 3]
    terms = torch.cat([torch.ones(len(timed), 1, dtype=torch.float64), measured[:, :3]], dim=1)
    relative = terms / seconds[:, None]
    # Large products take most of a step.
    size_weights = (seconds / seconds.max()) ** _SIZE_WEIGHT
    used, weights = [0, 1, 2, 3], size_weights
    found = torch.zeros(4, dtype=torch.float64)
    for _ in range(_FIT_ROUNDS):
        columns = relative[:, used] * weights[:, None]
        # Columns differ by twelve orders of magnitude.
        scale = columns.norm(dim=0)
        solution = torch.linalg.lstsq(columns / scale, weights[:, None]).solution[:, 0] / scale
        if solution.min() <= 0:
            used.pop(_spare_term(used, solution * scale))
            continue
        found = torch.zeros_like(found)
        found[used] = solution
        errors = (relative @ found - 1).abs()
        weights = (_OUTLIER / errors.clamp(min=_OUTLIER)).sqrt() * size_weights
    call, per_flop, per_read, per_written = found.tolist()
    return ProductTerms(
        call_seconds=call,
        flop_rate=1 / per_flop,
        read=1 / per_read if per_read else None,
        write=1 / per_written if per_written else None,
    )
