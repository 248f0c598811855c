"""Rates of a device: curves over the size of the work, measured or published."""

from bisect import bisect_left
from itertools import pairwise
from math import exp, inf, log
from typing import Literal, NamedTuple, Self

from pydantic import Field, model_validator

from windlass.document import Document
from windlass.schema.graph import OtherAttention, Precision
from windlass.schema.machine.stack import AttentionKernel
from windlass.schema.plan import MomentFormat
from windlass.units import BytesPerSecond, FlopPerSecond, Seconds


class Point(NamedTuple):
    """One measured or published point of a curve."""

    size: float
    rate: float


class Curve(Document):
    """A rate as a function of work size: linear between points in log(size) and log(rate)."""

    points: tuple[Point, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _points_rise_and_have_rates(self) -> Self:
        for point in self.points:
            if not (0 < point.size < inf and 0 < point.rate < inf):
                raise ValueError(f"point {list(point)} must have a size and a rate above 0")
        for low, high in pairwise(self.points):
            if log(high.size) <= log(low.size):  # as `at` compares them
                raise ValueError(f"size {high.size:g} follows {low.size:g}; sizes must rise")
        return self

    def at(self, size: float) -> float:
        """The rate at `size`; beyond the ends it is the nearest point's rate."""
        index = bisect_left(self.points, size, key=lambda point: point.size)
        if index == 0:
            return self.points[0].rate
        if index == len(self.points):
            return self.points[-1].rate
        low, high = self.points[index - 1], self.points[index]
        share = (log(size) - log(low.size)) / (log(high.size) - log(low.size))
        return exp(log(low.rate) + share * (log(high.rate) - log(low.rate)))


class AttentionRate(Document):
    """Rate of attention for one head width: FLOP/s over sequence length.

    FLOP are counted over the full square of scores, so that a kernel which skips the half that a
    causal mask hides appears twice as fast, and are those of a fused kernel: its backward pass
    computes the scores once more.
    """

    kernel: AttentionKernel | None = None
    """The fused kernel; None means the one that the probe ran."""
    attention: OtherAttention | None = None
    """How attention is computed; None means by the fused kernel that torch prefers."""
    is_causal: bool = True
    """Whether later tokens were hidden. Head widths that were measured only so are without a mask
    as much faster or slower as those that were measured both ways."""
    compiled: bool = False
    """Whether it ran as compiled code; widths that did not are scaled in the same way."""
    head_width: int
    forward: Curve
    backward: Curve


class OpRate(Document):
    """Measured bytes/s over bytes moved, for one ATen op that `traffic` does not describe."""

    name: str
    """ATen's name of the op. A fused run of ops is as slow as the slowest of its ops."""
    precision: Precision
    compiled: bool = False
    curve: Curve


class MomentRate(Document):
    """Rate of decoding and encoding the optimizer's moments in one storage format."""

    moments: MomentFormat
    elements: float = Field(gt=0, lt=inf)
    """Elements per second whose two moments are decoded and encoded again, in full parts."""
    part_seconds: Seconds = 0.0
    """Fixed cost of one part; a weight takes at least one part."""


class TileRate(Document):
    """Rate of matrix products in tiles, which a device's processors compute in waves.

    Source: NVIDIA, Matrix Multiplication Background User's Guide, "tile quantization" and "wave
    quantization".
    """

    processors: int = Field(ge=1)
    """Streaming multiprocessors (compute units) of the device."""
    efficiency: float = Field(gt=0, le=1)
    """Share of the peak that deep products of whole waves reach."""
    ramp: float = Field(default=100.0, ge=0)
    """Depth (summed dimension) that filling and draining a tile costs."""
    waves: float = Field(default=0.5, ge=0, le=1)
    """Share of the loss in a last wave that is not full: 1 counts it fully, 0 not at all."""
    unaligned: float = Field(default=1.0, ge=0)
    """Share by which a product takes longer if a side is no multiple of 8 elements."""
    uneven: float = Field(default=0.0, ge=0)
    """The same if a side is a multiple of 8 but not of 64 elements."""


ProductRole = Literal["forward", "biased", "input_gradient", "weight_gradient"]
"""What a matrix product computes: a layer's output, the same with a bias, the gradient of its
input, or that of its weights."""


CACHED_BYTES = 2**24
"""Bytes of a tensor that was just made which are still in a processor's cache."""


class ProductRate(Document):
    """Measured time of products (m, k) by (k, n) with one role.

    It is `call + 2 m n k / flop_rate + (bytes of factors) / read + (bytes of result) / write`.
    Weights and saved activations come from memory and count as read. The input of a forward pass,
    and `CACHED_BYTES` of the gradient that a pass starts from, are still in the cache.
    """

    role: ProductRole
    call_seconds: Seconds
    flop_rate: FlopPerSecond
    read: BytesPerSecond | None = None
    """None means that reading takes no time of its own."""
    write: BytesPerSecond | None = None
    by_weights: Curve | None = None
    """FLOP/s over the elements (k n) of the right factor, at most `flop_rate` and in its place:
    kernels for a precision that a processor converts take its columns one by one, and those of a
    large one leave the caches before they are read again."""


class SparseProductRate(ProductRate):
    """Measured time of products whose weight keeps some blocks, in the terms of `ProductRate`.

    FLOP are those of the kept blocks. What kernels arrange anew counts as read: the kept blocks, or
    for their gradient both factors.
    """

    block: int = Field(ge=1)
    """Side of a block."""


class MatmulRate(Document):
    """Rate of matrix products and attention in one precision."""

    precision: Precision
    also: tuple[Precision, ...] = ()
    """Formats in which the device computes at the same rates."""
    peak: FlopPerSecond
    """Dense peak rate, the denominator of MFU."""
    curve: Curve
    """FLOP/s over FLOP of one product."""
    tiles: TileRate | None = None
    """Rate by a product's sides, used in place of `curve` where it is stated."""
    products: tuple[ProductRate, ...] = ()
    """Measured times by a product's sides and role, used in place of `curve` where they are."""
    biased: Curve | None = None
    """The same for a product with a bias; None means that a bias takes no extra time."""
    sparse_products: tuple[SparseProductRate, ...] = ()
    """Measured times of products with kept blocks of a weight, by side of a block and role."""
    sparse_efficiency: Curve | None = None
    """Rate of a product with kept blocks over that of the dense product, over the side of a block,
    used where none were measured; None means the same rate."""
    attention: Curve
    """FLOP/s of fused attention over FLOP of one call."""
    attention_rates: tuple[AttentionRate, ...] = ()
    """Measured rates for each head width, used in place of `attention`."""
