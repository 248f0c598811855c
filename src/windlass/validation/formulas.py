"""Closed formulas for seconds and bytes of the parts of a training step, over columns of runs.

These are pure functions of numpy arrays that broadcast against each other. Their only constants are
those of published algorithms. Letters: b micro-batch, s sequence, d width, h heads, f feed-forward
width, v vocabulary, t tensor-parallel degree, p pipeline stages.
"""

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.float64]
"""One number for each run, `Float[run]`."""
ColumnOrFloat = Column | float
"""One number for each run, or one for all."""

TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.92), (128, 64, 0.75), (64, 64, 0.5))
"""Rows and columns of the tile that one multiprocessor computes at once, and its speed relative to
the fastest tile. Source: NVIDIA, Matrix Multiplication Background User's Guide (the
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
    """Seconds of `batch` matrix products, (rows, depth) by (depth, columns), with the best tile.

    Each tile costs `2 rows columns (depth + ramp)` FLOP of one processor; tiles run in waves of as
    many as there are processors. A last wave that is not full counts in part: `whole_waves` = 1
    counts it fully, 0 lets tiles share it. Sizes are rounded up to multiples of a tile.

    Source: NVIDIA, Matrix Multiplication Background User's Guide, "tile quantization" and "wave
    quantization".

    Args:
        rows: rows of the left factor.
        columns: columns of the right factor.
        depth: length of the dimension that is summed over.
        batch: number of independent products of this shape.
        flop_rate: FLOP/s of all processors together, full and deep.
        processors: multiprocessors (SMs) of the device.
        ramp: depth that filling and draining a tile costs.
        whole_waves: share of a last wave's loss that is real, 0 to 1.
    """
    seconds = []
    for high, wide, speed in TILES:
        full = np.ceil(rows / high) * np.ceil(columns / wide) * batch / processors
        waves = whole_waves * np.ceil(full) + (1.0 - whole_waves) * np.maximum(full, 1.0)
        flop = 2.0 * high * wide * (depth + ramp) * waves * processors
        seconds.append(np.asarray(flop / (flop_rate * speed), dtype=float))
    return np.asarray(np.minimum.reduce(seconds), dtype=float)


def smooth_max(one: ColumnOrFloat, other: ColumnOrFloat, sharpness: float = 4.0) -> Column:
    """`(one^q + other^q)^(1/q)`: the longer of two that overlap, more if they are close.

    Two overlapping activities of equal length seldom hide each other fully.
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

    A ring within one host has the rate of the inner link. Rings that leave the host share its
    network cards: there are as many as a host has devices for each device of one ring.

    Args:
        ranks: size of the ring.
        stride: devices from one rank to the next.
        per_host: devices in a host.
        devices: devices of the whole run.
        inner: bytes/s of a device to others of its host.
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
    """Seconds of an all-reduce of ranks that lie `stride` devices apart, without latencies.

    The longer of `2 (k-1)/k B / inner` in hosts of k ranks each and `2 (h-1)/h B / w` between h
    hosts: parts of the buffer pass both at once. Between two hosts half of it goes each way, which
    is little more than half of what a ring through all ranks would send.

    Source: NVIDIA, "Massively Scale Your Deep Learning Training with NCCL 2.4" (trees of hosts).

    Args:
        nbytes: bytes of the buffer on each rank.
        ranks: size of the group.
        stride: devices from one rank to the next.
        per_host: devices in a host.
        devices: devices of the whole run.
        inner: bytes/s of a device to others of its host.
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
    """Parameters of one block: `2 d^2 (1 + key_share) + matrices d f`.

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
    """Bytes of 16-bit activations that one block keeps for its backward pass.

    `s b d (10 + 24/t + 5 h s/(d t))`, with `34/t` under sequence parallelism and without the
    last term if attention scores are not kept. Source: Korthikanti et al. 2022,
    arXiv:2205.05198, table 2.

    Args:
        tokens: tokens of a micro-batch on this device, b s.
        width: width of the model.
        heads: number of attention heads.
        seq: length of a sequence.
        slices: tensor-parallel degree.
        cut_sequence: 1 under sequence parallelism, else 0.
        scores: 1 if attention scores are kept, 0 if they are recomputed.
    """
    whole = 10.0 * (1.0 - cut_sequence * (1.0 - 1.0 / slices))
    squares = 5.0 * heads * seq / width * scores
    return np.asarray(tokens * width * (whole + (24.0 + squares) / slices), dtype=float)
