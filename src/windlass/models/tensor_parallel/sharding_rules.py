"""Tensor-parallel sharding rules: how each module of a layer is split over ranks.

Each of t tensor-parallel ranks computes a contribution to the gradient of a parameter; the sum of
the contributions over the ranks is the gradient. This module does not import torch.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from windlass.errors import ModelError, did_you_mean
from windlass.models.fine_tuning.adapter_names import ADAPTER_DROPOUT
from windlass.sparsity import BlockPart, column_groups

if TYPE_CHECKING:
    from torch import nn

ShardingStyle = Literal[
    "region",  # tokens are all-gathered at its entry, partial sums reduce-scattered at its exit
    "whole",  # a region whose output every rank has in full, and keeps its own tokens of
    "column",  # column-parallel linear: a rank has some of the outputs
    "row",  # row-parallel linear: a rank has some of the inputs and gives a partial sum
    "linear",  # a linear outside of regions; in a grid a rank has its own features
    "scores",  # a linear in a region whose outputs all ranks have; in a grid it sums its features
    "experts",  # experts in a region, of whose weights a rank has `ShardingRule.weights`
    "vocabulary",  # an embedding's rows, or the head's outputs
    "count",  # an integer setting that counts sharded features, and so is divided
    "sharded",  # a dropout inside a region, on features that are sharded
    "replicated",  # a dropout inside a region, on features that are not
    "tokenwise",  # a layer that treats each token by itself and is not sharded
]

IndexRange = tuple[int, int]
"""(start, stop)."""

_NUMBER = r"[0-9]{1,6}"
_RULE_TEXT = re.compile(
    rf"(?P<style>[a-z]+)(?: in (?P<parts>{_NUMBER}(?::{_NUMBER})*))?(?: by (?P<unit>{_NUMBER}))?"
)
_FEATURE_STYLES = ("column", "row")
REGION_STYLES: tuple[ShardingStyle, ...] = ("region", "whole")
"""Rules of modules that take and give all tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingRule:
    """How one module, or one setting of a module, is sharded."""

    style: ShardingStyle
    parts: tuple[int, ...] = (1,)
    """Proportions of the parts that are fused in the sharded features, such as queries, keys and
    values. Each part is sharded by itself."""
    unit: int = 1
    """Consecutive features that stay on one rank, such as the width of a head."""
    is_apart: bool = False
    """Whether what surrounds a column or row has all features: the outputs of a column are
    gathered, and of the inputs of a row each rank takes its own."""
    weights: tuple[tuple[str, int, tuple[int, ...]], ...] = ()
    """Of experts: each weight's name, the dimension that is sharded, and its fused parts."""

    def ranges(self, total: int, degree: int, index: int) -> tuple[IndexRange, ...]:
        """Ranges of `total` features that rank `index` of `degree` has.

        A vocabulary is split into shards of `ceil(total / degree)` rows, the last ones smaller.
        """
        if self.style == "vocabulary":
            largest = -(-total // degree)
            return ((min(index * largest, total), min((index + 1) * largest, total)),)
        ranges: list[IndexRange] = []
        start = 0
        for width in self._part_widths(total):
            local_width = width // degree
            ranges.append((start + index * local_width, start + (index + 1) * local_width))
            start += width
        return tuple(ranges)

    def divisibility_error(self, total: int, degree: int) -> str | None:
        """Why `total` features cannot be sharded over `degree` ranks; None if they can."""
        if self.style == "vocabulary":
            largest = -(-total // degree)
            if (degree - 1) * largest < total:
                return None
            return f"{total} rows, which leave rank {degree - 1} without any; lower the degree"
        if total % sum(self.parts):
            proportions = ":".join(map(str, self.parts))
            return f"{total} features, which do not split into parts {proportions}; fix the rule"
        for width in self._part_widths(total):
            if width % (self.unit * degree):
                heads = f" in heads of {self.unit}" if self.unit > 1 else ""
                return (
                    f"{width} features{heads}, which {degree} ranks cannot share equally; "
                    f"use a degree that divides {width // self.unit}"
                )
        return None

    def _part_widths(self, total: int) -> Iterator[int]:
        for part in self.parts:
            yield total * part // sum(self.parts)


class BlockLayout(NamedTuple):
    """Sizes of a weight of which only some blocks are kept."""

    inputs: int
    outputs: int
    block: int
    """Side of a block."""
    parts: tuple[BlockPart, ...]
    """Kept blocks a row, for all block rows."""


def block_shard_error(layout: BlockLayout, rule: ShardingRule, degree: int) -> str | None:
    """Why the ranks of a tensor-parallel degree cannot share kept blocks; None if they can."""
    if rule.style == "row" and len(rule.parts) > 1:
        return "is a sparse row of several parts, which is not sharded; keep it dense"
    total = layout.outputs if rule.style == "column" else layout.inputs
    for start, stop in rule.ranges(total, degree, 0):
        if start % layout.block or stop % layout.block:
            return (
                f"has {stop - start} features on each of {degree} ranks, which blocks of "
                f"{layout.block} do not divide; lower the degree or `sparsity.block`"
            )
    columns = layout.inputs // layout.block
    groups = min(column_groups(columns, part.kept) for part in layout.parts)
    if rule.style == "column" or groups % degree == 0:
        return None
    level = _nearest_level(layout, degree)
    ways = [f"a level of {level:.4g}, the nearest that {degree} can share"] if level else []
    ways += [f"at most {groups} ranks" if groups > 1 else "no tensor parallelism"]
    return (
        f"keeps {layout.parts[0].kept} of {columns} blocks a row, which {degree} ranks cannot "
        f"share equally; use {', or '.join(ways)}"
    )


def _nearest_level(layout: BlockLayout, degree: int) -> float | None:
    """The level nearest to a layer's at which row-parallel ranks have equal shares."""
    columns, part = layout.inputs // layout.block, layout.parts[0]
    legal = [
        kept
        for kept in range(degree, columns, degree)
        if part.rows * kept % columns == 0 and columns % degree == 0 and degree in (2, 4, 8)
    ]
    nearest = min(legal, key=lambda kept: abs(kept - part.kept), default=None)
    return None if nearest is None else 1 - nearest / columns


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSharding:
    """The sharding rules of one layer."""

    rules: Mapping[str, ShardingRule]
    """Rules by path inside the layer, of modules and of counts; the empty path is the layer."""
    is_first: bool
    """Whether the layer takes what the data give: each rank gets all of it and continues with its
    own tokens."""
    positions: int | None = None
    """Tokens of every sample, which the ranks may share unequally: the last ones then hold zeros
    behind theirs. None if a sequence is shared equally."""

    def regions(self) -> tuple[str, ...]:
        """Paths of the regions."""
        return tuple(path for path, rule in self.rules.items() if rule.style in REGION_STYLES)

    def enclosing_region(self, path: str) -> str | None:
        """Path of the region that contains, or is, the module at `path`; None if there is none."""
        regions = self.regions()
        return next((r for r in regions if not r or f"{path}.".startswith(f"{r}.")), None)


class GridShardable:
    """A module with a product of its own, which knows how one rank of a grid computes it."""

    def grid_class(self, style: ShardingStyle) -> "type[nn.Module]":
        """The class with a rank's part of the product.

        It takes `tp_rank`, and `is_sharded`: whether the ranks of one row share what the columns of
        a rule give, or each has all of it.
        """
        raise NotImplementedError


class TensorShardable:
    """A module that defines its own sharding rules."""

    def sharding_rules(self) -> Mapping[str, ShardingRule]:
        """Rules by path inside the module; the empty path is the module itself."""
        raise NotImplementedError


def parse_sharding_rule(pattern: str, text: str) -> ShardingRule:
    """Parses a rule as a request writes it.

    A rule is one of the names of `ShardingStyle`. A column or row may also name the parts that are
    fused in its features, as `column in 3` (equal parts) or `column in 4:1:1`, and the features
    that stay together, as `column by 64` (heads of 64 features).

    Raises:
        ModelError: the text is not a rule.
    """
    match = _RULE_TEXT.fullmatch(text.strip())
    styles = [style for style in get_args(ShardingStyle) if style != "experts"]
    if match is None or match["style"] not in styles:
        word = match["style"] if match else text
        raise ModelError(
            f"rule `{pattern}` = `{text}`: must be one of {', '.join(styles)}, a column or row "
            f"also as `column in 3 by 64`{did_you_mean(word, styles)}"
        )
    parts = tuple(int(part) for part in (match["parts"] or "1").split(":"))
    if len(parts) == 1:
        parts = (1,) * parts[0]
    unit = int(match["unit"] or 1)
    if match["style"] not in _FEATURE_STYLES and (len(parts) > 1 or unit > 1):
        raise ModelError(f"rule `{pattern}` = `{text}`: only a column or row has parts or heads")
    if not parts or 0 in parts or not unit:
        raise ModelError(f"rule `{pattern}` = `{text}`: parts and heads count from 1")
    return ShardingRule(style=match["style"], parts=parts, unit=unit)  # type: ignore[arg-type]  # checked above


def resolve_sharding(
    layer: "nn.Module",
    name: str,
    rules: Mapping[str, ShardingRule],
    *,
    is_first: bool,
    positions: int | None = None,
) -> LayerSharding:
    """The rules of one layer.

    Args:
        rules: rules by pattern of full names, `*` for one name between dots; they override those
            that modules define themselves, and later ones override earlier ones.
        is_first: whether the layer takes what the data give.
        positions: tokens of every sample, where these are no sequences of any length.
    """
    resolved: dict[str, ShardingRule] = {}
    for path, module in layer.named_modules():
        if isinstance(module, TensorShardable):
            own_rules = dict(module.sharding_rules())
            if LayerSharding(rules=resolved, is_first=is_first).enclosing_region(path) is not None:
                own_rules.pop("", None)  # its tokens are gathered already
            resolved |= {_join(path, inner): rule for inner, rule in own_rules.items()}
    for pattern, rule in rules.items():
        resolved |= dict.fromkeys(matching_paths(layer, name, pattern, rule), rule)
    for path, _ in layer.named_modules():
        linear, _, leaf = path.rpartition(".")
        around = resolved[linear].style if linear in resolved else None
        if leaf == ADAPTER_DROPOUT and around != "vocabulary":
            style: ShardingStyle = "sharded" if around == "row" else "replicated"
            resolved.setdefault(path, ShardingRule(style=style))
    return LayerSharding(rules=resolved, is_first=is_first, positions=positions)


def matching_paths(
    layer: "nn.Module", name: str, pattern: str, rule: ShardingRule
) -> Iterator[str]:
    """Paths inside a layer that a rule's pattern matches."""
    if rule.style == "count":
        paths = _integer_settings(layer)
    else:
        paths = (path for path, _ in layer.named_modules())
    wanted = pattern.split(".")
    for path in paths:
        parts = _join(name, path).split(".")
        if len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted)):
            yield path


def _integer_settings(layer: "nn.Module") -> Iterator[str]:
    """Paths of attributes of a layer's modules that are integers."""
    for path, module in layer.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, int) and not isinstance(value, bool):
                yield _join(path, name)


def _join(*parts: str) -> str:
    return ".".join(filter(None, parts))
