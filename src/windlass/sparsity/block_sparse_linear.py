"""A linear layer that stores only the kept blocks of its weight.

Equal counts make equal work: of the rows of one part of a weight, of columns in the input's
gradient, and of the slices that tensor-parallel ranks have. Which blocks are kept is random.
"""

from collections.abc import Sequence
from math import gcd

import torch
from torch import Tensor, nn

from windlass.sparsity.block_linear_ops import block_linear
from windlass.sparsity.levels import BlockPart, column_groups


class BlockSparseLinear(nn.Module):
    """A linear map whose weight consists of blocks, most of them absent.

    `values[n, i, j] = W[row * B + i, column * B + j]` of the dense weight `W[out, in]`, where
    `blocks[n] = (row, column)`. Blocks are sorted by row, then by column.
    """

    blocks: Tensor
    """Block row and block column of each kept block, `Int32[n 2]`."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        bias: bool,
        block: int,
        parts: Sequence[BlockPart],
        std: float | None = None,
        diagonal: bool = False,
        given_groups: int | None = None,
    ) -> None:
        """A layer with a mask and weights drawn from torch's default generator.

        Args:
            block: rows and columns B of a block.
            parts: kept blocks a row, for all block rows of the outputs.
            std: standard deviation of the kept weights at the start; the bias then starts at zero.
                None draws both as `nn.Linear` of the same size does.
            diagonal: whether kept blocks form dense tiles.
            given_groups: column groups of equal counts in a mask that `take_mask` puts in later;
                None draws a mask.
        """
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        self.block, self.parts = block, tuple(parts)
        self.std, self.diagonal, self.given_groups = std, diagonal, given_groups
        kept = sum(part.rows * part.kept for part in self.parts)
        self.values = nn.Parameter(torch.empty(kept, block, block))
        self.register_buffer("blocks", torch.empty(kept, 2, dtype=torch.int32))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.reset_parameters()

    @property
    def groups(self) -> int:
        """Column groups in which every row keeps equally many blocks."""
        if self.given_groups is not None:
            return self.given_groups
        columns = self.in_features // self.block
        return min(column_groups(columns, part.kept) for part in self.parts)

    @property
    def density(self) -> float:
        """Share of the dense weight that is kept."""
        return self.values.numel() / (self.in_features * self.out_features)

    def reset_parameters(self) -> None:
        """Draws mask and weights; kept weights start as those of a dense layer, not rescaled."""
        if self.values.is_meta:
            return
        columns = self.in_features // self.block
        with torch.no_grad():
            if self.given_groups is None:
                self.blocks.copy_(draw_block_mask(self.parts, columns, diagonal=self.diagonal))
            else:
                self.blocks.zero_()
            if self.std is not None:
                self.values.normal_(std=self.std)
                if self.bias is not None:
                    self.bias.zero_()
            else:
                limit = self.in_features**-0.5
                self.values.uniform_(-limit, limit)
                if self.bias is not None:
                    self.bias.uniform_(-limit, limit)

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[... in]` to `[... out]`."""
        return block_linear(x, self.values, self.blocks, self.out_features, self.bias)

    def dense_weight(self) -> Tensor:
        """The weight `[out in]`, zero where blocks are absent."""
        rows, columns = self.out_features // self.block, self.in_features // self.block
        grid = self.values.new_zeros(rows, columns, self.block, self.block)
        row, column = self.blocks.long().unbind(1)
        grid = grid.index_put((row, column), self.values)
        return grid.transpose(1, 2).reshape(self.out_features, self.in_features)

    def take_mask(self, blocks: Tensor) -> None:
        """Takes over a mask `Int32[n 2]` in any order."""
        columns = self.in_features // self.block
        self.blocks.copy_(blocks[(blocks[:, 0].long() * columns + blocks[:, 1]).argsort()])

    @torch.no_grad()
    def take_dense_weight(self, weight: Tensor) -> None:
        """Takes over the kept blocks of a dense weight `[out in]`."""
        rows, columns = self.out_features // self.block, self.in_features // self.block
        grid = weight.view(rows, self.block, columns, self.block).transpose(1, 2)
        row, column = self.blocks.long().unbind(1)
        self.values.copy_(grid[row, column])

    def extra_repr(self) -> str:
        """What torch prints of the layer."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, block={self.block}, density={self.density:.4g}"
        )


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
