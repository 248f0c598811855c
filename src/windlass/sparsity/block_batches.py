"""The products of `block_linear` on GPUs: few launches of PyTorch's `bmm`, over padded rows.

Each call reads one number from the device: the most blocks of a line. No GPU has run it yet; its
numbers are tested on CPUs.
"""

from collections.abc import Iterator

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
    table = _table(blocks[:, 0].long(), features // block)
    # What a line lacks is a block of zeros that reads the first input.
    matrices = torch.cat((matrices, matrices.new_zeros(1, block, block)))
    sources = torch.cat((blocks[:, 1].long(), blocks.new_zeros(1, dtype=torch.int64)))
    out = source.new_empty((tokens, features))
    outputs = _by_block(out, block)
    for part in _parts(len(table), table.shape[1] * tokens * block * source.itemsize):
        indices = table[part]
        x = inputs[:, sources[indices]].transpose(0, 1).flatten(2)
        outputs[:, part] = torch.bmm(x, matrices[indices].flatten(1, 2)).transpose(0, 1)
    return out


def _table(targets: Tensor, lines: int) -> Tensor:
    """The blocks of each line, `[line, most blocks of a line]`, filled up with their count."""
    counts = torch.bincount(targets, minlength=lines)
    most = int(counts.max()) if len(targets) else 0
    table = targets.new_full((lines, most), len(targets))
    by_line = torch.argsort(targets, stable=True)
    lines_in_order = targets[by_line]
    firsts = counts.cumsum(0) - counts
    places = torch.arange(len(targets), device=targets.device) - firsts[lines_in_order]
    table[lines_in_order, places] = by_line
    return table


def _by_block(x: Tensor, block: int) -> Tensor:
    """`[t, features]` as `[t, features / block, block]`."""
    return x.reshape(len(x), x.shape[1] // block, block)


def _parts(count: int, item_bytes: int) -> Iterator[slice]:
    """Slices of `count` items, each of at most the bytes that are gathered at a time."""
    size = max(1, _GATHERED_BYTES // max(1, item_bytes))
    yield from (slice(start, start + size) for start in range(0, count, size))
