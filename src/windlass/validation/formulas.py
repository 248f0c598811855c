"""Formulas: seconds and bytes of the pieces of a training step, over whole columns of plans.

Pure functions of numpy arrays that broadcast against each other: no machine, no plan, no constant
of their own but those of a published algorithm. Letters as everywhere: b micro-batch, s sequence, d
width, h heads, f hidden width, v vocabulary, t slices, p stages.
"""

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.float64]
ColumnOrFloat = Column | float
"""One for each run, or one for all."""

TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.92), (128, 64, 0.75), (64, 64, 0.5))
"""Rows and columns of a product that one processor of a GPU computes at once, and its speed for the
size relative to the fastest. Source: NVIDIA, Matrix Multiplication Background User's Guide (the
smaller tiles' shares are read off its figure 3)."""


def product_seconds(
    rows: ColumnOrFloat,
    columns: ColumnOrFloat,
    depth: ColumnOrFloat,
    *,
    batch: ColumnOrFloat = 1.0,
    flop_rate: ColumnOrFloat,
    processors: ColumnOrFloat,
    ramp: ColumnOrFloat,
    whole_waves: ColumnOrFloat,
) -> Column:
    """Seconds of `batch` products of (rows, depth) by (depth, columns) on tiles: the best tiling.

    Each tile costs `2 rows columns (depth + ramp)` FLOP of one processor; tiles run in waves of as
    many as there are processors. A last wave that is not full counts in part: `whole_waves` = 1
    makes it whole, 0 lets tiles share it. What a size lacks to a multiple of a tile is computed
    too.

    Source: NVIDIA, Matrix Multiplication Background User's Guide, "tile quantization" and "wave
    quantization".

    Args:
        rows: of the left factor.
        columns: of the right factor.
        depth: that is summed over.
        batch: independent products of this shape.
        flop_rate: FLOP/s of all processors together, full and deep.
        processors: of the device (SMs).
        ramp: depth that filling and draining a tile costs.
        whole_waves: share of a last wave's loss that is real, 0 to 1.
    """
    found = []
    for high, wide, speed in TILES:
        full = np.ceil(rows / high) * np.ceil(columns / wide) * batch / processors
        waves = whole_waves * np.ceil(full) + (1.0 - whole_waves) * np.maximum(full, 1.0)
        flop = 2.0 * high * wide * (depth + ramp) * waves * processors
        found.append(np.asarray(flop / (flop_rate * speed), dtype=float))
    return np.asarray(np.minimum.reduce(found), dtype=float)


def smooth_max(one: ColumnOrFloat, other: ColumnOrFloat, sharpness: float = 4.0) -> Column:
    """`(one^q + other^q)^(1/q)`: the longer of two that overlap, more if they are close.

    Two lanes that take equally long seldom cover each other fully; with q = infinity they would.
    """
    most = np.maximum(np.maximum(one, other), 1e-30)
    summed = (one / most) ** sharpness + (other / most) ** sharpness
    return np.asarray(most * summed ** (1.0 / sharpness), dtype=float)


def ring_bytes(nbytes: ColumnOrFloat, ranks: ColumnOrFloat) -> Column:
    """Bytes that each of `ranks` sends when a ring gathers, or scatters the sum of, `nbytes`.

    `(n - 1)/n B`; an all-reduce is both. Source: Patarasuk & Yuan 2009, JPDC 69(2).
    """
    return np.asarray(nbytes * (1.0 - 1.0 / np.maximum(ranks, 1.0)), dtype=float)


def ring_rate(
    ranks: ColumnOrFloat,
    stride: ColumnOrFloat,
    *,
    per_host: ColumnOrFloat,
    devices: ColumnOrFloat,
    inner: ColumnOrFloat,
    cards: ColumnOrFloat,
) -> Column:
    """Bytes/s of one ring of ranks that lie `stride` devices apart.

    Within a host the inner link's. Beyond it a host's network cards are shared by the rings that
    pass through it at once: as many as it has devices for each that one ring has there.

    Args:
        ranks: of the ring.
        stride: devices from one rank to the next.
        per_host: devices of a host.
        devices: of the whole run.
        inner: bytes/s of a device within its host.
        cards: bytes/s of all network cards of a host, one direction.
    """
    on_host = np.minimum(per_host, devices)
    mine = _on_host(ranks, stride, on_host)
    outer = np.minimum(inner, cards * mine / on_host)
    return np.asarray(np.where(ranks * stride > on_host, outer, inner), dtype=float)


def all_reduce_seconds(
    nbytes: ColumnOrFloat,
    ranks: ColumnOrFloat,
    stride: ColumnOrFloat,
    *,
    per_host: ColumnOrFloat,
    devices: ColumnOrFloat,
    inner: ColumnOrFloat,
    cards: ColumnOrFloat,
) -> Column:
    """Seconds of an all-reduce of ranks that lie `stride` devices apart, latencies apart.

    The longer of `2 (k-1)/k B / inner` in hosts of k ranks each and `2 (h-1)/h B / w` between h
    hosts: parts of the buffer pass both at once. Between two hosts half of it goes each way, which
    is little more than half of what a ring through all ranks would send.

    Source: NVIDIA, "Massively Scale Your Deep Learning Training with NCCL 2.4" (trees of hosts).

    Args:
        nbytes: of the buffer on each rank.
        ranks: of the group.
        stride: devices from one rank to the next.
        per_host: devices of a host.
        devices: of the whole run.
        inner: bytes/s of a device within its host.
        cards: bytes/s of all network cards of a host, one direction.
    """
    ranks = np.maximum(ranks, 1.0)
    mine = _on_host(ranks, stride, np.minimum(per_host, devices))
    rate = ring_rate(ranks, stride, per_host=per_host, devices=devices, inner=inner, cards=cards)
    within = 2.0 * ring_bytes(nbytes, np.minimum(mine, ranks)) / inner
    between = 2.0 * ring_bytes(nbytes, np.ceil(ranks / mine)) / rate
    return np.asarray(np.maximum(within, between), dtype=float)


def _on_host(ranks: ColumnOrFloat, stride: ColumnOrFloat, on_host: ColumnOrFloat) -> Column:
    """Ranks of one group in one host, where they lie `stride` devices apart."""
    return np.asarray(np.clip(np.floor(on_host / stride), 1.0, np.maximum(ranks, 1.0)), dtype=float)


def pipeline_slots(
    micros: ColumnOrFloat, stages: ColumnOrFloat, interleave: ColumnOrFloat = 1.0
) -> Column:
    """Micro-batch slots of a step under 1F1B: `m + (p - 1)/v`.

    Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2.
    """
    return np.asarray(micros + (stages - 1.0) / interleave, dtype=float)


def block_parameters(
    width: ColumnOrFloat, hidden: ColumnOrFloat, key_share: ColumnOrFloat, matrices: ColumnOrFloat
) -> Column:
    """Weights of one block: `2 d^2 (1 + key_share) + matrices d f`.

    `key_share` is key heads over heads (grouped queries), `matrices` 2, or 3 of a gated unit.
    """
    attention = 2.0 * width * width * (1.0 + key_share)
    return np.asarray(attention + matrices * width * hidden, dtype=float)


def step_flop(
    tokens: ColumnOrFloat,
    parameters: ColumnOrFloat,
    layers: ColumnOrFloat,
    width: ColumnOrFloat,
    seq: ColumnOrFloat,
) -> Column:
    """Model FLOP of a step: `tokens (6 P + 12 L d s)`, recompute not counted.

    Source: Chowdhery et al. 2022, PaLM, appendix B.
    """
    return np.asarray(tokens * (6.0 * parameters + 12.0 * layers * width * seq), dtype=float)


def activation_bytes(
    tokens: ColumnOrFloat,
    width: ColumnOrFloat,
    heads: ColumnOrFloat,
    seq: ColumnOrFloat,
    slices: ColumnOrFloat,
    *,
    cut_sequence: ColumnOrFloat,
    scores: ColumnOrFloat,
) -> Column:
    """Bytes that one block of 16-bit numbers keeps for its backward pass.

    `s b d (10 + 24/t + 5 h s/(d t))`, with `34/t` where the sequence is cut too and without the
    last term where scores are not kept. Source: Korthikanti et al. 2022, arXiv:2205.05198, table 2.

    Args:
        tokens: of a micro-batch on this device, b s.
        width: of the model.
        heads: of attention.
        seq: length of a sequence.
        slices: that a layer is cut in.
        cut_sequence: 1 where sequence parallel, else 0.
        scores: 1 where attention's scores are kept, 0 where they are computed anew.
    """
    whole = 10.0 * (1.0 - cut_sequence * (1.0 - 1.0 / slices))
    squares = 5.0 * heads * seq / width * scores
    return np.asarray(tokens * width * (whole + (24.0 + squares) / slices), dtype=float)
