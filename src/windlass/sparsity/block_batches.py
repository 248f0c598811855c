"""The products of `block_linear` on GPUs: few launches of PyTorch's `bmm`, over padded rows.

No call reads anything from the device, so that the host never waits. No GPU has run it yet; its
numbers are tested on CPUs.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

_GATHERED_BYTES = 2**28
"""Activations that are gathered at a time."""


def linear(
    x: Tensor, values: Tensor, blocks: Tensor, out_features: int, bias: Tensor | None
) -> Tensor:
    """`x @ W.T + bias`, `[t out]`, of inputs `[t in]`."""
    y = _product(x, values.transpose(1, 2), blocks, out_features)
    return y if bias is None else y.add_(bias)


def input_grad(gy: Tensor, values: Tensor, blocks: Tensor, in_features: int) -> Tensor:
    """`gy @ W`, `[t in]`, of gradients `[t out]`."""
    return _product(gy, values, blocks.flip(1), in_features)


def weight_grad(gy: Tensor, x: Tensor, blocks: Tensor, block: int) -> Tensor:
    """The kept blocks `[n B B]` of `gy.T @ x`, of `[t out]` and `[t in]`."""
    grad = gy.new_empty((len(blocks), block, block))
    outputs, inputs = _by_block(gy, block), _by_block(x, block)
    for part in _parts(len(blocks), 2 * len(x) * block * x.itemsize):
        row, column = blocks[part].long().unbind(1)
        grad[part] = torch.bmm(outputs[:, row].permute(1, 2, 0), inputs[:, column].transpose(0, 1))
    return grad


def _product(source: Tensor, matrices: Tensor, blocks: Tensor, features: int) -> Tensor:
    """The sum of `source[:, s] @ matrices[n]` in each target t, for `(t, s) = blocks[n]`."""
    block, tokens = matrices.shape[-1], len(source)
    inputs = _by_block(source, block)
    runs = _runs(blocks[:, 0].long(), features // block)
    # What a run lacks is a block of zeros that reads the first input.
    matrices = torch.cat((matrices, matrices.new_zeros(1, block, block)))
    sources = torch.cat((blocks[:, 1].long(), blocks.new_zeros(1, dtype=torch.int64)))
    wide = torch.promote_types(source.dtype, torch.float32)
    out = source.new_zeros((features // block + 1, tokens, block), dtype=wide)
    for part in _parts(len(runs.blocks), runs.blocks.shape[1] * tokens * block * source.itemsize):
        indices = runs.blocks[part]
        x = inputs[:, sources[indices]].transpose(0, 1).flatten(2)
        sums = torch.bmm(x, matrices[indices].flatten(1, 2))
        out.index_add_(0, runs.targets[part], sums.to(wide))
    return out[:-1].transpose(0, 1).reshape(tokens, features).to(source.dtype)


class _Runs(NamedTuple):
    """Blocks of one target each, in runs of equal length: shapes that no mask decides."""

    blocks: Tensor
    """`Int64[run, length]`, filled up with the count of blocks."""
    targets: Tensor
    """`Int64[run]`, one beyond the last target where a run has no block."""


def _runs(targets: Tensor, lines: int) -> _Runs:
    """The blocks of each target in runs as long as its mean count.

    `sum ceil(c / length) <= n / length + lines` bounds the runs, so that the host need not ask the
    device how many there are.
    """
    count = len(targets)
    length = max(1, -(-count // max(1, lines)))
    most = count // length + lines
    counts = targets.new_zeros(lines).index_add_(0, targets, torch.ones_like(targets))
    runs = (counts + length - 1) // length
    in_order = torch.argsort(targets, stable=True)
    lines_in_order = targets[in_order]
    places = torch.arange(count, device=targets.device)
    places = places - (counts.cumsum(0) - counts)[lines_in_order]
    rows = (runs.cumsum(0) - runs)[lines_in_order] + places // length
    table = targets.new_full((most, length), count)
    table[rows, places % length] = in_order
    owners = targets.new_full((most,), lines)
    owners[rows] = lines_in_order
    return _Runs(table, owners)


def _by_block(x: Tensor, block: int) -> Tensor:
    """`[t, features]` as `[t, features / block, block]`."""
    return x.reshape(len(x), x.shape[1] // block, block)


def _parts(count: int, item_bytes: int) -> Iterator[slice]:
    """Slices of `count` items, each of at most the bytes that are gathered at a time."""
    size = max(1, _GATHERED_BYTES // max(1, item_bytes))
    yield from (slice(start, start + size) for start in range(0, count, size))
