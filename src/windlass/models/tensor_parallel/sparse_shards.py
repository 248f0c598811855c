"""Sparse layers of a tensor-parallel rank: which blocks it has, and how it runs them.

Every rank keeps the whole mask, which is small, and takes its own part of it in each pass. Blocks
are sorted by row, then by column, and every row keeps equally many in each group of columns. So a
column-parallel rank has a few contiguous ranges of blocks, and a row-parallel one an equal share of
every row.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn import functional

from windlass.models.tensor_parallel.sharding_rules import (
    BlockLayout,
    IndexRange,
    ShardingRule,
    block_shard_error,
)
from windlass.sparsity import BlockPart, BlockSparseLinear, MaskedLinear, block_linear


@dataclass(frozen=True, slots=True)
class SparseShard:
    """A rank's share of a sparse layer: the layer's rule, and which of `degree` ranks it is."""

    rule: ShardingRule
    index: int
    degree: int


def value_ranges(module: BlockSparseLinear, shard: SparseShard) -> tuple[IndexRange, ...]:
    """Ranges of the kept blocks that a rank has, in the order in which it has them."""
    if shard.rule.style == "column":
        return tuple((run.first, run.stop) for run in _column_runs(module, shard))
    ranges: list[IndexRange] = []
    for part, (start, _) in _part_ranges(module):
        local = part.kept // shard.degree
        first = start + shard.index * local
        ranges += ((first + r * part.kept, first + r * part.kept + local) for r in range(part.rows))
    return tuple(ranges)


def shard_sparse_module(module: nn.Module, shard: SparseShard) -> None:
    """Makes a sparse layer work on a rank's part; its parameters are the rank's already."""
    if isinstance(module, BlockSparseLinear):
        if shard.rule.style == "column":
            runs = tuple(_column_runs(module, shard))
            module.out_features //= shard.degree
            _change_class(module, ColumnBlockSparseLinear, runs=runs)
        else:
            module.in_features //= shard.degree
            _change_class(module, RowBlockSparseLinear, shard=shard)
    elif isinstance(module, MaskedLinear):
        full_outputs, full_inputs = module.out_features, module.in_features
        module.out_features, module.in_features = module.weight.shape
        total = full_outputs if shard.rule.style == "column" else full_inputs
        ranges = shard.rule.ranges(total, shard.degree, shard.index)
        _change_class(module, ShardedMaskedLinear, shard=shard, ranges=ranges)


def sparse_shard_error(module: nn.Module, rule: ShardingRule, degree: int) -> str | None:
    """Why the ranks of a tensor-parallel degree cannot share a sparse layer; None if they can."""
    if not isinstance(module, BlockSparseLinear):
        return None
    layout = BlockLayout(module.in_features, module.out_features, module.block, module.parts)
    if rule.style == "row" and module.groups % degree and module.given_groups is not None:
        return (
            f"has a mask that keeps unequal shares of a row on {degree} ranks; use another mask, "
            "or no tensor parallelism"
        )
    return block_shard_error(layout, rule, degree)


def is_sparse(module: nn.Module) -> bool:
    """Whether a module is a linear layer with absent weights."""
    return isinstance(module, (BlockSparseLinear, MaskedLinear))


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Consecutive kept blocks of a rank."""

    first: int
    stop: int
    row_shift: int
    """Added to their block rows: where they are among the rank's own rows."""


class ColumnBlockSparseLinear(BlockSparseLinear):
    """Column-parallel block-sparse linear: a rank has some of the block rows."""

    runs: tuple[BlockRun, ...]

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[b s d]` to `[b s f/t]`."""
        row, column = self.blocks.unbind(1)
        rows = torch.cat([row[run.first : run.stop] + run.row_shift for run in self.runs])
        columns = torch.cat([column[run.first : run.stop] for run in self.runs])
        blocks = torch.stack((rows, columns), dim=1)
        return block_linear(x, self.values, blocks, self.out_features, self.bias)


class RowBlockSparseLinear(BlockSparseLinear):
    """Row-parallel block-sparse linear: a rank has some of the block columns."""

    shard: SparseShard

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[b s f/t]` to a partial sum of `[b s d]`."""
        index, degree = self.shard.index, self.shard.degree
        blocks = torch.cat(
            [
                self.blocks[start:stop].view(part.rows, degree, -1, 2)[:, index].reshape(-1, 2)
                for part, (start, stop) in _part_ranges(self)
            ]
        )
        row, column = blocks.unbind(1)
        columns = column - index * (self.in_features // self.block)
        # Each rank adds its share of the bias, as in `RowLinear`.
        bias: Tensor | None = None if self.bias is None else self.bias * (1 / degree)
        blocks = torch.stack((row, columns), dim=1)
        return block_linear(x, self.values, blocks, self.out_features, bias)


class ShardedMaskedLinear(MaskedLinear):
    """A rank's part of a masked linear layer, by rows or by columns."""

    shard: SparseShard
    ranges: tuple[IndexRange, ...]
    """Outputs of a column-parallel layer, inputs of a row-parallel one."""

    def forward(self, x: Tensor) -> Tensor:
        """Maps the rank's inputs to its outputs, or to its partial sum."""
        is_column = self.shard.rule.style == "column"
        dim = 0 if is_column else 1
        mask = torch.cat(
            [self.mask.narrow(dim, start, stop - start) for start, stop in self.ranges], dim=dim
        )
        bias: Tensor | None = self.bias
        if bias is not None and not is_column:
            bias = bias * (1 / self.shard.degree)
        return functional.linear(x, self.weight * mask, bias)


def _column_runs(module: BlockSparseLinear, shard: SparseShard) -> Iterator[BlockRun]:
    starts = [0, *accumulate(part.kept for part in module.parts for _ in range(part.rows))]
    local_row = 0
    for start, stop in shard.rule.ranges(module.out_features, shard.degree, shard.index):
        first_row, stop_row = start // module.block, stop // module.block
        yield BlockRun(starts[first_row], starts[stop_row], local_row - first_row)
        local_row += stop_row - first_row


def _part_ranges(module: BlockSparseLinear) -> Iterator[tuple[BlockPart, IndexRange]]:
    """Each part with the range of its kept blocks."""
    start = 0
    for part in module.parts:
        stop = start + part.rows * part.kept
        yield part, (start, stop)
        start = stop


def _change_class(module: nn.Module, new_class: type[nn.Module], **attributes: object) -> None:
    module.__class__ = new_class
    vars(module).update(attributes)
