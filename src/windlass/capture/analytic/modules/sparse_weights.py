"""Weights of linear layers, dense or sparse, and the products with them.

They mirror `sparsity.BlockSparseLinear` and `sparsity.MaskedLinear`, as `models.sparsity` puts them
in place of linear layers, and the shards of `models.tensor_parallel.sparse_shards`, expression by
expression.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Literal, NamedTuple

from windlass.capture.analytic.ops.block_products import block_linear
from windlass.capture.analytic.ops.elementwise import mul, scale, shift, unary
from windlass.capture.analytic.ops.matrix_products import linear
from windlass.capture.analytic.ops.views import cat, narrow, reshape, select, stack, unbind
from windlass.capture.analytic.scope import Scope
from windlass.capture.analytic.tensor import Tensor
from windlass.models import BlockLayout, ShardingRule, TransformerConfig, block_shard_error
from windlass.sparsity import BlockPart, WeightPart, kept_counts

LinearName = Literal["attention", "projection", "gate", "up", "down"]
"""A linear layer of a block."""


class Weight(NamedTuple):
    """A dense weight `[out in]`, or what a rank has of it."""

    weight: Tensor

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x W^T + b`."""
        return linear(x, self.weight, bias)


class MaskedWeight(NamedTuple):
    """A weight of which single elements are absent, or what a rank has of it."""

    weight: Tensor
    mask: Tensor
    """The whole weight's, on every rank."""
    rule: ShardingRule
    degree: int

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x W^T + b`; a row-parallel rank adds its share of the bias."""
        if self.degree == 1:
            return linear(x, mul(self.weight, self.mask), bias)
        dim = 0 if self.rule.style == "column" else 1
        ranges = self.rule.ranges(self.mask.shape[dim], self.degree, 0)
        mask = cat([narrow(self.mask, dim, start, stop - start) for start, stop in ranges], dim)
        if bias is not None and dim:
            bias = scale(bias)
        return linear(x, mul(self.weight, mask), bias)


class BlockWeight(NamedTuple):
    """Kept blocks of a weight, or those that a rank has."""

    values: Tensor
    blocks: Tensor
    """The whole weight's, on every rank."""
    layout: BlockLayout
    """The whole weight's."""
    rule: ShardingRule
    degree: int

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x W^T + b`; a row-parallel rank adds its share of the bias."""
        outputs = self.layout.outputs
        if self.degree == 1:
            return block_linear(x, self.values, self.blocks, outputs, bias)
        if self.rule.style == "column":
            return self._column_product(x, bias, outputs // self.degree)
        blocks = cat([self._columns_of(part, start) for part, start in _starts(self.layout)], 0)
        row, column = unbind(blocks, 1)
        columns = unary("sub", column)
        bias = None if bias is None else scale(bias)
        blocks = stack((row, columns), 1)
        return block_linear(x, self.values, blocks, outputs, bias)

    def _column_product(self, x: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
        runs = self._runs()
        row, column = unbind(self.blocks, 1)
        rows = cat([shift(narrow(row, 0, start, stop - start)) for start, stop in runs], 0)
        columns = cat([narrow(column, 0, start, stop - start) for start, stop in runs], 0)
        blocks = stack((rows, columns), 1)
        return block_linear(x, self.values, blocks, outputs, bias)

    def _runs(self) -> list[tuple[int, int]]:
        """Consecutive kept blocks of a column-parallel rank."""
        block, parts = self.layout.block, self.layout.parts
        starts = [0, *accumulate(part.kept for part in parts for _ in range(part.rows))]
        ranges = self.rule.ranges(self.layout.outputs, self.degree, 0)
        return [(starts[start // block], starts[stop // block]) for start, stop in ranges]

    def _columns_of(self, part: BlockPart, start: int) -> Tensor:
        """The kept blocks of one part that a row-parallel rank has."""
        whole = narrow(self.blocks, 0, start, part.rows * part.kept)
        local = part.kept // self.degree
        grouped = select(reshape(whole, (part.rows, self.degree, local, 2)), 1, 0)
        return reshape(grouped, (part.rows * local, 2))


def new_weight(
    scope: Scope, name: LinearName, rule: ShardingRule, sizes: tuple[int, int]
) -> Weight | MaskedWeight | BlockWeight:
    """What a rank has of the weight of a linear layer, which becomes a parameter of it.

    Args:
        name: which of a block's it is.
        sizes: outputs and inputs of the whole weight.
    """
    rows, columns, degree = scope.rank.rows, scope.rank.columns, scope.rank.degree
    is_column = rule.style == "column"
    sharded = 0 if is_column else 1
    outputs, inputs = sizes
    shape = (
        (outputs // rows, inputs // columns) if is_column else (outputs // columns, inputs // rows)
    )
    kept, sparsity = _kept_parts(scope.config, name), scope.config.sparsity
    if kept and sparsity is not None and sparsity.is_blocked:
        block = sparsity.block
        parts = tuple(BlockPart(part.outputs // block, count) for part, count in kept)
        layout = BlockLayout(inputs, outputs, block, parts)
        scope.note_sparse(block_shard_error(layout, rule, degree))
        total = sum(part.rows * part.kept for part in parts)
        values = scope.parameter(
            "values", (total // degree, block, block), sharded=0, replicated_over=None
        )
        return BlockWeight(values, scope.buffer((total, 2), "int32"), layout, rule, degree)
    weight = scope.parameter(
        "weight", shape, sharded=sharded if columns == 1 else None, replicated_over=None
    )
    if not kept:
        return Weight(weight)
    scope.note_sparse(None)
    return MaskedWeight(weight, scope.buffer(sizes, "bool"), rule, degree)


def _starts(layout: BlockLayout) -> Sequence[tuple[BlockPart, int]]:
    """Each part with the place of its first kept block."""
    starts = accumulate((part.rows * part.kept for part in layout.parts), initial=0)
    return list(zip(layout.parts, starts, strict=False))


def _kept_parts(config: TransformerConfig, name: LinearName) -> list[tuple[WeightPart, int]]:
    """What a linear layer keeps of each of its parts; nothing if it is dense."""
    if config.sparsity is None:
        return []
    counts, block = _kept_counts(config), config.sparsity.block
    kept = [(part, counts[part]) for part in _parts(config)[name]]
    if config.sparsity.is_blocked:
        is_dense = all(count * block == part.inputs for part, count in kept)
    else:
        is_dense = all(count == part.outputs * part.inputs for part, count in kept)
    return [] if is_dense else kept


@lru_cache(maxsize=64)
def _kept_counts(config: TransformerConfig) -> Mapping[WeightPart, int]:
    """Kept blocks in each block row of every part of a model, or kept weights of the part."""
    if config.sparsity is None:
        return {}
    parts = Counter(part for linear in _parts(config).values() for part in linear)
    return kept_counts(
        config.sparsity, {part: count * config.layers for part, count in parts.items()}
    )


def _parts(config: TransformerConfig) -> dict[LinearName, tuple[WeightPart, ...]]:
    """The roles of the outputs of each linear layer of a block, in the order of its modules."""
    width, ffn = config.width, config.ffn
    query, kv = config.heads * config.head_width, config.kv_heads * config.head_width
    up = (WeightPart("up", ffn, width),)
    attention = (
        WeightPart("query", query, width),
        WeightPart("key", kv, width),
        WeightPart("value", kv, width),
    )
    parts: dict[LinearName, tuple[WeightPart, ...]] = {
        "attention": attention,
        "projection": (WeightPart("projection", width, query),),
    }
    if config.is_gated:
        parts["gate"] = up
    return parts | {"up": up, "down": (WeightPart("down", width, ffn),)}
