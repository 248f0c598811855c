"""Draws masks of whole blocks that keep as many blocks in every row, column and column group.

Equal counts make equal work: of the rows of one part of a weight, of columns in the input's
gradient, and of the slices that tensor-parallel ranks have. Which blocks are kept is random.
"""

from collections.abc import Sequence
from math import gcd

import torch
from torch import Tensor

from windlass.sparsity.levels import BlockPart, column_groups


def draw_block_mask(parts: Sequence[BlockPart], columns: int, *, diagonal: bool) -> Tensor:
    """Block row and block column of each kept block, `Int32[n 2]`, sorted by row, then by column.

    Each row of a part keeps `kept` blocks, each column as many of a part as any other, and each of
    `column_groups` an equal share of every row. Numbers come from torch's default generator.

    Args:
        parts: the weight's parts, from its first row to its last.
        columns: block columns, for each part a divisor of `rows * kept`.
        diagonal: whether kept blocks form dense tiles: `columns / kept` sets of consecutive rows,
            each with columns of its own, which are chosen at random.
    """
    grids = [
        torch.ones(part.rows, columns, dtype=torch.bool, device="cpu")
        if part.kept == columns
        else torch.cat(_group_grids(part, columns, diagonal=diagonal), dim=1)
        for part in parts
    ]
    return torch.cat(grids).nonzero().to(torch.int32)


def _group_grids(part: BlockPart, columns: int, *, diagonal: bool) -> list[Tensor]:
    """What each column group keeps, `Bool[rows columns/groups]` each."""
    groups = column_groups(columns, part.kept)
    width, kept = columns // groups, part.kept // groups
    grid = _diagonal_grid if diagonal else _balanced_grid
    return [grid(part.rows, width, kept) for _ in range(groups)]


def _balanced_grid(rows: int, columns: int, kept: int) -> Tensor:
    """A random grid with `kept` entries in each row and equal numbers in each column.

    It consists of square cells, each with equal numbers in its rows and columns.
    """
    side = gcd(rows, columns)
    kept_in_cell = kept // (columns // side)
    grid = torch.cat(
        [
            torch.cat([_balanced_cell(side, kept_in_cell) for _ in range(columns // side)], dim=1)
            for _ in range(rows // side)
        ]
    )
    return _shuffle(grid)


def _balanced_cell(side: int, kept: int) -> Tensor:
    """A random square grid with `kept` entries in each row and column: cyclic shifts, shuffled."""
    index = torch.arange(side, device="cpu")
    shifts = torch.randperm(side, device="cpu")[:kept]
    grid = torch.zeros(side, side, dtype=torch.bool, device="cpu")
    grid.scatter_(1, (index.unsqueeze(1) + shifts) % side, True)
    return _shuffle(grid)


def _diagonal_grid(rows: int, columns: int, kept: int) -> Tensor:
    """Dense tiles of `kept` columns on the diagonal, with the columns shuffled."""
    tile_rows = rows * kept // columns
    tile = torch.arange(rows, device="cpu") // tile_rows
    grid = tile.unsqueeze(1) == torch.arange(columns, device="cpu") // kept
    return grid[:, torch.randperm(columns, device="cpu")]


def _shuffle(grid: Tensor) -> Tensor:
    rows, columns = grid.shape
    return grid[torch.randperm(rows, device="cpu")][:, torch.randperm(columns, device="cpu")]
