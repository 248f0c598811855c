"""Time of matrix products: by their sides as measured, or by tiles in waves over processors."""

import numpy as np

from windlass.cost.arrays import Floats
from windlass.cost.device_rates import rates_at
from windlass.schema import (
    CACHED_BYTES,
    MatmulRate,
    ProductRate,
    SparseProductRate,
    TileRate,
)

_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.92), (128, 64, 0.75), (64, 64, 0.5))
"""Rows and columns of the tile that one processor computes at once, and its speed relative to the
fastest tile. Source: NVIDIA, Matrix Multiplication Background User's Guide (the smaller tiles'
shares are read off its figure 3)."""


def product_seconds(
    rate: ProductRate, itemsize: int, count: Floats, m: Floats, n: Floats, k: Floats
) -> Floats:
    """Seconds of `count` products (m, k) by (k, n), as `ProductRate` states.

    Args:
        rate: the measured terms.
        itemsize: bytes of an element.
        count: number of products.
        m: rows of the result.
        n: columns of the result.
        k: elements of each sum.
    """
    made = {"weight_gradient": 0.0, "input_gradient": CACHED_BYTES}.get(rate.role, np.inf)
    cold = itemsize * k * n + np.maximum(0.0, itemsize * k * m - made)
    seconds = _seconds(rate, 2 * m * n * k, cold, itemsize * m * n)
    if rate.by_weights is not None:
        seconds = 2 * m * n * k / rates_at(rate.by_weights, k * n)
    return np.asarray(rate.call_seconds + count * seconds)


def sparse_product_seconds(
    rate: SparseProductRate, itemsize: int, density: Floats, m: Floats, n: Floats, k: Floats
) -> Floats:
    """Seconds of products (m, k) by (k, n) with a weight of kept blocks, as `SparseProductRate`.

    Args:
        rate: the measured terms.
        itemsize: bytes of an element.
        density: kept share of the weight: of the right factor, or of the result if that is its
            gradient.
        m: rows of the result.
        n: columns of the result.
        k: elements of each sum of the dense product.
    """
    if rate.role == "weight_gradient":
        read, written = k * (m + n), density * m * n
    else:
        read, written = density * k * n, m * n
    seconds = _seconds(rate, 2 * m * n * k * density, itemsize * read, itemsize * written)
    return np.asarray(rate.call_seconds + seconds)


def _seconds(rate: ProductRate, flop: Floats, read: Floats, written: Floats) -> Floats:
    """Seconds of a product beyond its call."""
    reading = read / rate.read if rate.read else 0.0
    writing = written / rate.write if rate.write else 0.0
    return np.asarray(flop / rate.flop_rate + reading + writing)


def tile_seconds(
    rate: MatmulRate, batch: Floats, rows: Floats, columns: Floats, depth: Floats
) -> Floats:
    """Seconds of `batch` products of (rows, depth) by (depth, columns), with the best tile.

    Each tile costs `2 rows columns (depth + ramp)` FLOP of one processor, and tiles run in waves of
    as many as there are processors. Sides are rounded up to whole tiles.

    Source: NVIDIA, Matrix Multiplication Background User's Guide, "tile quantization" and "wave
    quantization".

    Args:
        rate: rate of a device that states `tiles`.
        batch: number of products of this shape.
        rows: rows of the left factor.
        columns: columns of the right factor.
        depth: length of the summed dimension.
    """
    tiles = rate.tiles or TileRate(processors=1, efficiency=1.0)
    flop_rate = rate.peak * tiles.efficiency
    seconds = []
    for high, wide, speed in _TILES:
        full = np.ceil(rows / high) * np.ceil(columns / wide) * batch / tiles.processors
        waves = tiles.waves * np.ceil(full) + (1.0 - tiles.waves) * np.maximum(full, 1.0)
        flop = 2.0 * high * wide * (depth + tiles.ramp) * waves * tiles.processors
        seconds.append(flop / (flop_rate * speed))
    odd, part = (
        np.logical_or.reduce([np.mod(side, by) > 0 for side in (columns, depth)]) for by in (8, 64)
    )
    longer = 1.0 + np.where(odd, tiles.unaligned, np.where(part, tiles.uneven, 0.0))
    return np.asarray(np.minimum.reduce(seconds) * longer)
