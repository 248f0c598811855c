"""Which part of each parameter of a layer one tensor-parallel rank has."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor, nn

from windlass.models.tensor_parallel.collectives import TensorParallelRank
from windlass.models.tensor_parallel.sharding_rules import (
    IndexRange,
    LayerSharding,
    ShardingRule,
)
from windlass.models.tensor_parallel.sparse_shards import SparseShard, value_ranges
from windlass.schema import TensorAxis
from windlass.sparsity import BlockSparseLinear


class EqualShard(NamedTuple):
    """One of `total` equal shards of an axis."""

    number: int = 0
    """Index of the shard, from 0."""
    total: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamShard:
    """One rank's part of a parameter."""

    full_shape: tuple[int, ...]
    """Shape of the full parameter."""
    ranges: tuple[tuple[IndexRange, ...] | None, ...]
    """Index ranges of each dimension, in the order in which the rank has them; None: the full
    dimension."""
    replicated_over: TensorAxis | None
    """The ranks that have the same part, whose contributions to its gradient are summed; None if no
    other rank has it."""

    @property
    def is_sharded(self) -> bool:
        """Whether the part is less than the full parameter."""
        return any(ranges is not None for ranges in self.ranges)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the rank's part."""
        return tuple(
            size if ranges is None else sum(stop - start for start, stop in ranges)
            for size, ranges in zip(self.full_shape, self.ranges, strict=True)
        )

    def extract(self, full: Tensor) -> Tensor:
        """The rank's part of a full tensor; a view if it is one range of each dimension."""
        for dim, ranges in enumerate(self.ranges):
            if ranges is not None:
                parts = [full.narrow(dim, start, stop - start) for start, stop in ranges]
                full = parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)
        return full

    def write_into(self, full: Tensor, local: Tensor) -> None:
        """Copies the rank's part into a full tensor."""
        _copy_ranges(full, local, self.ranges)

    def pieces(self, first: int, rows: int) -> Iterator["Piece"]:
        """The rectangles of the full parameter that some rows of the rank's part are.

        Args:
            first: the first row of the part; 0 of a scalar.
            rows: how many rows; a scalar has one.
        """
        every = [
            ranges if ranges is not None else ((0, size),)
            for size, ranges in zip(self.full_shape, self.ranges, strict=True)
        ]
        dims = [tuple(_with_places(ranges)) for ranges in every]
        if dims:
            dims[0] = tuple(_within(dims[0], first, first + rows))
        for ranges in product(*dims):
            yield Piece(
                offsets=tuple(start for start, _, _ in ranges),
                part=tuple(slice(place, place + size) for _, size, place in ranges),
            )


class Piece(NamedTuple):
    """A rectangle of a full parameter, and where some rows of a rank's part have it."""

    offsets: tuple[int, ...]
    """First index of each dimension in the full parameter."""
    part: tuple[slice, ...]
    """Indices among these rows of the part."""


def _with_places(ranges: Sequence[IndexRange]) -> Iterator[tuple[int, int, int]]:
    """First index, size, and place in the part of each range."""
    place = 0
    for start, stop in ranges:
        yield start, stop - start, place
        place += stop - start


def _within(
    ranges: Sequence[tuple[int, int, int]], first: int, end: int
) -> Iterator[tuple[int, int, int]]:
    """What of ranges lies in places from `first` to `end`, which are counted from 0 then."""
    for start, size, place in ranges:
        low, high = max(first, place), min(end, place + size)
        if low < high:
            yield start + low - place, high - low, low - first


def _copy_ranges(
    full: Tensor, local: Tensor, ranges: Sequence[tuple[IndexRange, ...] | None]
) -> None:
    """Copies a part into a full tensor, one dimension after the other from the last on."""
    if not ranges:
        full.copy_(local)
        return
    dim, offset = len(ranges) - 1, 0
    for start, stop in ranges[-1] or ((0, full.shape[dim]),):
        size = stop - start
        _copy_ranges(full.narrow(dim, start, size), local.narrow(dim, offset, size), ranges[:-1])
        offset += size


def param_shards(
    layer: nn.Module, sharding: LayerSharding, tp_rank: TensorParallelRank
) -> dict[str, ParamShard]:
    """One rank's part of each parameter of a layer.

    In a grid a column-parallel weight has the outputs of all ranks of its row, for the rank's own
    features; a row-parallel weight has the inputs of all ranks of its row, in order, for its own
    features; a `linear` or `scores` weight has its own features for all outputs; a norm has its own
    features. Embedding tables and the head's outputs are sharded over all ranks, as in one
    dimension.

    Returns:
        Parts by the parameter's name inside the layer.
    """
    norms = frozenset(sharded_norm_paths(layer, sharding)) if tp_rank.columns > 1 else frozenset()
    shards: dict[str, ParamShard] = {}
    for name, parameter in layer.named_parameters(remove_duplicate=False):
        path, _, leaf = name.rpartition(".")
        shape = tuple(parameter.shape)
        if path in norms:
            shards[name] = _feature_shard(shape, tp_rank)
        else:
            rule, shard = sharding.rules.get(path), inner_shard(layer, sharding, path, tp_rank)
            module = layer.get_submodule(path)
            if rule is not None and rule.style == "experts":
                shards[name] = _expert_shard(shape, rule, leaf, shard)
            elif isinstance(module, BlockSparseLinear) and rule is not None and leaf == "values":
                ranges = value_ranges(module, SparseShard(rule, shard.number, shard.total))
                shards[name] = ParamShard(
                    full_shape=shape, ranges=(ranges, None, None), replicated_over=None
                )
            else:
                shards[name] = _param_shard(shape, rule, leaf, tp_rank, shard)
    return shards


def sharded_norm_paths(layer: nn.Module, sharding: LayerSharding) -> Iterator[str]:
    """Paths of torch's norms over the features that the ranks of one row shard.

    Norms inside a region over fewer features, such as those of heads, are excluded: each rank has
    all of these features.
    """
    width = _layer_width(layer, sharding)
    for path, module in layer.named_modules():
        if isinstance(module, (nn.LayerNorm, nn.RMSNorm)) and not sharding.is_first:
            shape = tuple(module.normalized_shape)
            outside = sharding.enclosing_region(path) is None
            if shape == (width,) or (outside and len(shape) == 1):
                yield path


def _layer_width(layer: nn.Module, sharding: LayerSharding) -> int | None:
    """Features between layers, the inputs of the first column; None for a layer without one."""
    columns = (
        layer.get_submodule(path) for path, rule in sharding.rules.items() if rule.style == "column"
    )
    return next((m.in_features for m in columns if isinstance(m, nn.Linear)), None)


def _param_shard(
    shape: tuple[int, ...],
    rule: ShardingRule | None,
    leaf: str,
    tp_rank: TensorParallelRank,
    shard: EqualShard,
) -> ParamShard:
    """The part of parameter `leaf` of a linear or embedding, given its shard of the features."""
    replicated = ParamShard(
        full_shape=shape, ranges=(None,) * len(shape), replicated_over="all"
    )  # fmt: skip
    if rule is not None and rule.style == "linear" and tp_rank.columns > 1:
        return _feature_shard(shape, tp_rank)
    if rule is not None and rule.style == "scores" and leaf == "weight" and tp_rank.columns > 1:
        return _feature_shard(shape, tp_rank)
    if rule is None or rule.style not in ("column", "row", "vocabulary"):
        return replicated
    if rule.style == "vocabulary" and leaf == "lora_a":
        return replicated
    if rule.style == "vocabulary" or (rule.style == "column" and len(shape) == 1):
        first = rule.ranges(shape[0], shard.total, shard.number)
        axis: TensorAxis | None = None if shard.total == tp_rank.degree else "features"
        ranges = (first, *replicated.ranges[1:])
        return ParamShard(full_shape=shape, ranges=ranges, replicated_over=axis)
    every = (None,) * (len(shape) - 2)  # a rank has its part of all experts
    if leaf == "lora_b" and rule.style == "column":
        rows = _row_ranges(rule, shape[-2], tp_rank, shard)
        return replace(replicated, ranges=(*every, rows, None), replicated_over=None)
    if leaf == "lora_a" and rule.style == "row":
        columns = _row_ranges(rule, shape[-1], tp_rank, shard)
        return replace(replicated, ranges=(*every, None, columns), replicated_over=None)
    if leaf == "weight":
        outputs, inputs = shape[-2:]
        weight_ranges: tuple[tuple[IndexRange, ...] | None, ...]
        if rule.style == "column":
            weight_ranges = (
                _row_ranges(rule, outputs, tp_rank, shard),
                _local_features(inputs, tp_rank),
            )
        else:
            weight_ranges = (
                _local_features(outputs, tp_rank),
                _row_ranges(rule, inputs, tp_rank, shard),
            )
        return ParamShard(full_shape=shape, ranges=(*every, *weight_ranges), replicated_over=None)
    return replicated if tp_rank.columns == 1 else _feature_shard(shape, tp_rank)


def _expert_shard(
    shape: tuple[int, ...], rule: ShardingRule, leaf: str, shard: EqualShard
) -> ParamShard:
    """The part of a weight of experts: some of the inner features of each."""
    for name, dim, parts in rule.weights:
        if name == leaf:
            of_part = ShardingRule(style="column", parts=parts)
            ranges: list[tuple[IndexRange, ...] | None] = [None] * len(shape)
            ranges[dim] = of_part.ranges(shape[dim], shard.total, shard.number)
            return ParamShard(full_shape=shape, ranges=tuple(ranges), replicated_over=None)
    return ParamShard(full_shape=shape, ranges=(None,) * len(shape), replicated_over="all")


def _feature_shard(shape: tuple[int, ...], tp_rank: TensorParallelRank) -> ParamShard:
    """The part of a parameter whose last dimension is features; ranks of a column have the same."""
    axis: TensorAxis | None = "tokens" if tp_rank.rows > 1 else None
    leading = (None,) * (len(shape) - 1)
    ranges = (*leading, _local_features(shape[-1], tp_rank))
    return ParamShard(full_shape=shape, ranges=ranges, replicated_over=axis)


def _row_ranges(
    rule: ShardingRule, total: int, tp_rank: TensorParallelRank, shard: EqualShard
) -> tuple[IndexRange, ...]:
    """Ranges of the sharded features that all ranks of this row have, rank after rank."""
    if shard.total != tp_rank.degree:
        return rule.ranges(total, shard.total, shard.number)
    first = tp_rank.row * tp_rank.columns
    ranges: list[IndexRange] = []
    for index in range(first, first + tp_rank.columns):
        for start, stop in rule.ranges(total, tp_rank.degree, index):
            if ranges and ranges[-1][1] == start:
                ranges[-1] = (ranges[-1][0], stop)
            else:
                ranges.append((start, stop))
    return tuple(ranges)


def _local_features(total: int, tp_rank: TensorParallelRank) -> tuple[IndexRange, ...] | None:
    """The rank's range of the features between layers; None: all of them."""
    if tp_rank.columns == 1:
        return None
    width = total // tp_rank.columns
    return ((tp_rank.column * width, (tp_rank.column + 1) * width),)


def inner_shard(
    layer: nn.Module, sharding: LayerSharding, path: str, tp_rank: TensorParallelRank
) -> EqualShard:
    """The rank's shard of the features at `path` between a region's column and row.

    They are sharded over all ranks. If heads divide by the rows of a grid but not by all its ranks,
    the ranks of one row all have the features of their row and compute the same.

    Args:
        path: path of a sharded module or setting.
    """
    region = sharding.enclosing_region(path)
    in_grid = tp_rank.columns > 1 and region is not None
    if in_grid and not _region_divides(layer, sharding, region, tp_rank.degree):
        return EqualShard(tp_rank.row, tp_rank.rows)
    return EqualShard(tp_rank.index, tp_rank.degree)


def _region_divides(
    layer: nn.Module, sharding: LayerSharding, region: str | None, degree: int
) -> bool:
    """Whether everything sharded inside a region divides by a degree."""
    return all(
        _divides(layer, path, rule, degree)
        for path, rule in sharding.rules.items()
        if sharding.enclosing_region(path) == region
    )


def _divides(layer: nn.Module, path: str, rule: ShardingRule, degree: int) -> bool:
    if rule.style == "count":
        owner, _, name = path.rpartition(".")
        return bool(getattr(layer.get_submodule(owner), name) % degree == 0)
    module = layer.get_submodule(path)
    if rule.style not in ("column", "row"):
        return True
    total: int = getattr(module, "out_features" if rule.style == "column" else "in_features")
    return rule.divisibility_error(total, degree) is None
