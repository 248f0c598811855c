"""Which blocks an update of a mask drops and grows, as a pure function of norms and scores.

SET (Mocanu et al. 2018, arXiv:1707.04780) grows at random; RigL (Evci et al. 2020,
arXiv:1911.11134, algorithm 1) where the dense gradient is largest. Both drop the smallest weights
of a layer. Here a weight is a block, and each part of a row gets as many new blocks as it loses: so
every row, and every group of columns in it, keeps its number of blocks.
"""

import hashlib
from typing import NamedTuple

import torch
from torch import Tensor


class BlockGrid(NamedTuple):
    """The blocks that a weight has room for."""

    rows: int
    columns: int
    groups: int = 1
    """Groups of consecutive columns, of which each row keeps equally many blocks; it divides the
    columns."""


class MaskUpdate(NamedTuple):
    """The blocks that an update drops, and those that take their places in the list."""

    slots: Tensor
    """`Int64[m]`: positions of the dropped blocks in the list of kept ones, each once."""
    blocks: Tensor
    """`Int32[m 2]`: row and column of the block that takes each of these positions; it was absent,
    and lies in the row and the column group of the one that it follows."""


def mask_update(
    blocks: Tensor, norms: Tensor, scores: Tensor, grid: BlockGrid, share: float
) -> MaskUpdate:
    """The update of one weight's mask: its smallest blocks go, those with the best scores come.

    Equal norms and scores are taken in the order of the list, and of the columns. A part of a row
    that has too few absent blocks keeps the largest of its own.

    Args:
        blocks: row and column of each kept block, `Int32[n 2]`, in any order.
        norms: size of each of them, `Float[n]`.
        scores: how much each block of the grid is wanted, `Float[rows columns]`; those of kept
            blocks do not count.
        share: share of the kept blocks that is replaced.
    """
    span = grid.columns // grid.groups
    rows, columns = blocks.long().unbind(1)
    cells = rows * grid.groups + columns // span
    kept = torch.zeros(grid.rows, grid.columns, dtype=torch.bool, device=blocks.device)
    kept[rows, columns] = True
    absent = (~kept).view(-1, span).sum(1)
    by_norm = torch.argsort(norms, stable=True)
    may_go = _ranks_within(cells[by_norm]) < absent[cells[by_norm]]
    dropped = by_norm[may_go][: round(share * len(blocks))].sort().values
    slots = dropped[torch.argsort(cells[dropped], stable=True)]
    counts = torch.bincount(cells[slots], minlength=len(absent))
    wanted = scores.masked_fill(kept, -torch.inf).view(-1, span)
    order = torch.argsort(wanted, dim=1, descending=True, stable=True)
    grown = torch.argsort(order, dim=1) < counts.unsqueeze(1)
    return MaskUpdate(slots, grown.view(grid.rows, grid.columns).nonzero().to(torch.int32))


def random_scores(grid: BlockGrid, *, seed: int, name: str, step: int) -> Tensor:
    """`Float[rows columns]`: SET's scores, from (seed, name, step) alone."""
    digest = hashlib.blake2b(f"{seed}/{name}/{step}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.rand(grid.rows, grid.columns, generator=generator)


def largest_blocks(norms: Tensor, kept: int, groups: int) -> Tensor:
    """`Int32[rows * kept, 2]`: the blocks with the largest norms, equally many in each group.

    Rows come in order, and in a row its columns; equal norms are taken in the order of the columns.

    Args:
        norms: size of every block of a weight, `Float[rows columns]`.
        kept: blocks to keep in each row, a multiple of `groups`.
        groups: groups of consecutive columns; it divides the columns.
    """
    grouped = norms.reshape(len(norms), groups, -1)
    order = torch.argsort(grouped, dim=2, descending=True, stable=True)
    taken = torch.argsort(order, dim=2) < kept // groups
    return taken.flatten(1).nonzero().to(torch.int32)


def _ranks_within(cells: Tensor) -> Tensor:
    """`Int64[n]`: how many earlier elements each element has the cell in common with."""
    order = torch.argsort(cells, stable=True)
    in_order = cells[order]
    starts = torch.searchsorted(in_order, in_order)
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(len(cells), device=cells.device) - starts
    return ranks
