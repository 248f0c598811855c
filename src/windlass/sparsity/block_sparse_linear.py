"""A linear layer that stores only the kept blocks of its weight."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from windlass.sparsity.block_linear_ops import block_linear
from windlass.sparsity.block_masks import draw_block_mask
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
            bias: whether it adds a bias, which is dense.
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
