"""The products of `block_linear` in PyTorch alone: a loop of `mm` over groups of blocks.

Output blocks that read the same input blocks form a group, which is one dense product: all of a
permuted block-diagonal weight, or else one block row or column at a time.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from windlass.errors import ModelError


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
    require_blocks_inside(blocks, outputs.shape[1], inputs.shape[1])
    for index, (row, column) in enumerate(blocks.tolist()):
        torch.mm(outputs[:, row].T, inputs[:, column], out=grad[index])
    return grad


def require_blocks_inside(blocks: Tensor, rows: int, columns: int) -> None:
    """Raises if a block lies outside of a weight of so many block rows and block columns.

    Raises:
        ModelError: one does, and how many do.
    """
    size = torch.tensor((rows, columns), device=blocks.device)
    outside = ((blocks < 0) | (blocks >= size)).any(1)
    if bool(outside.any()):
        row, column = blocks[outside][0].tolist()
        raise ModelError(
            f"{int(outside.sum())} of {len(blocks)} blocks are outside of a weight of {rows} block "
            f"rows and {columns} block columns, the first at row {row}, column {column}; it is the "
            "mask of another layer"
        )


class _Group(NamedTuple):
    """Output blocks that all read the same input blocks."""

    sources: tuple[int, ...]
    targets: list[int]
    matrices: list[list[int]]
    """Which block of values maps each source to each target, `[target, source]`."""


def _product(source: Tensor, matrices: Tensor, blocks: Tensor, features: int) -> Tensor:
    """The sum of `source[:, s] @ matrices[n]` in each target t, for `(t, s) = blocks[n]`."""
    block = matrices.shape[-1]
    out = source.new_zeros((len(source), features))
    inputs, outputs = _by_block(source, block), _by_block(out, block)
    require_blocks_inside(blocks, outputs.shape[1], inputs.shape[1])
    for group in _groups(blocks):
        x = inputs[:, list(group.sources)].flatten(1)
        weight = matrices[torch.tensor(group.matrices, device=matrices.device)]
        y = x @ weight.permute(1, 2, 0, 3).flatten(2).flatten(0, 1)
        outputs[:, group.targets] = _by_block(y, block)
    return out


def _groups(blocks: Tensor) -> Iterator[_Group]:
    by_target: dict[int, list[tuple[int, int]]] = {}
    for index, (target, source) in enumerate(blocks.tolist()):
        by_target.setdefault(target, []).append((source, index))
    by_sources: dict[tuple[int, ...], _Group] = {}
    for target, kept in by_target.items():
        sources, indices = zip(*sorted(kept), strict=True)
        group = by_sources.setdefault(sources, _Group(sources, [], []))
        group.targets.append(target)
        group.matrices.append(list(indices))
    yield from by_sources.values()


def _by_block(x: Tensor, block: int) -> Tensor:
    """`[t, features]` as `[t, features / block, block]`."""
    return x.reshape(len(x), x.shape[1] // block, block)
