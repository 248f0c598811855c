"""Cuts: in which way each module of a layer is cut over slices (no torch here).

A *slice* is one of the t devices that share a layer. What a slice computes of a gradient are
contributions: their sum over the slices is the gradient.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, get_args

from torch import nn

from windlass.errors import ModelError, did_you_mean

Way = Literal[
    "region",  # tokens are gathered at its entry; at its exit partial sums are summed, scattered
    "column",  # a linear map of which a slice has some outputs
    "row",  # a linear map of which a slice has some inputs; it gives a partial sum
    "map",  # a linear map outside of regions; in a grid a slice takes its own features
    "vocabulary",  # an embedding's rows, or the head's outputs
    "count",  # an integer setting that counts what is cut, and so is divided
    "features",  # a dropout inside a region, on features that are cut
    "whole",  # a dropout inside a region, on features that are not
    "alone",  # a layer that treats each token by itself, and needs no cut
]

Range = tuple[int, int]
"""(start, stop)."""

_WRITTEN = re.compile(r"(?P<way>[a-z]+)(?: in (?P<parts>\d+(?::\d+)*))?(?: by (?P<unit>\d+))?")
_FEATURES = ("column", "row")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The way in which one module, or one setting of a module, is cut."""

    way: Way
    parts: tuple[int, ...] = (1,)
    """Proportions of what lies side by side in the cut features, such as queries, keys and values.
    Each part is cut by itself."""
    unit: int = 1
    """Features that stay together: the width of a head."""

    def ranges(self, total: int, degree: int, index: int) -> tuple[Range, ...]:
        """Which of `total` features slice `index` of `degree` has, as (start, stop).

        A vocabulary's slices have `ceil(total / degree)` rows, the last ones fewer.
        """
        if self.way == "vocabulary":
            most = -(-total // degree)
            return ((min(index * most, total), min((index + 1) * most, total)),)
        found: list[Range] = []
        start = 0
        for width in self._widths(total):
            own = width // degree
            found.append((start + index * own, start + (index + 1) * own))
            start += width
        return tuple(found)

    def fault(self, total: int, degree: int) -> str | None:
        """What of `total` features cannot be cut so over `degree` slices; None if all can be."""
        if self.way == "vocabulary":
            most = -(-total // degree)
            if (degree - 1) * most < total:
                return None
            return f"{total} rows, which leave slice {degree - 1} without any; lower the degree"
        if total % sum(self.parts):
            shares = ":".join(map(str, self.parts))
            return f"{total} features, which do not lie side by side as {shares}; mend the rule"
        for width in self._widths(total):
            if width % (self.unit * degree):
                heads = f" in heads of {self.unit}" if self.unit > 1 else ""
                return (
                    f"{width} features{heads}, which {degree} slices cannot share equally; "
                    f"take a degree that divides {width // self.unit}"
                )
        return None

    def _widths(self, total: int) -> Iterator[int]:
        for part in self.parts:
            yield total * part // sum(self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCuts:
    """How one layer is cut."""

    ways: Mapping[str, Cut]
    """By path inside the layer, of modules and of the settings that count; empty: the layer."""
    first: bool
    """It takes tokens, all of them on every slice, and goes on with its own."""

    def regions(self) -> tuple[str, ...]:
        """Paths of the regions."""
        return tuple(path for path, cut in self.ways.items() if cut.way == "region")

    def region(self, path: str) -> str | None:
        """The region that the module at `path` is, or stands in; None for none."""
        found = (at for at in self.regions() if not at or f"{path}.".startswith(f"{at}."))
        return next(found, None)


class Cuttable:
    """A module that knows how it is cut."""

    def cuts(self) -> Mapping[str, Cut]:
        """Ways by path inside the module; an empty path is the module itself."""
        raise NotImplementedError


def read_cut(pattern: str, text: str) -> Cut:
    """A rule as a request writes it.

    `column`, `row`, `map`, `vocabulary`, `region`, `count`, `features`, `whole` or `alone`. A
    column or row may say what lies side by side, `column in 3` (equal parts) or `column in 4:1:1`,
    and what stays together, `column by 64` (heads of 64 features).

    Args:
        pattern: the name that the rule is for, for messages.
        text: the rule.

    Raises:
        ModelError: it cannot be read.
    """
    match = _WRITTEN.fullmatch(text.strip())
    if match is None or match["way"] not in get_args(Way):
        word = match["way"] if match else text
        raise ModelError(
            f"rule `{pattern}` = `{text}`: must be one of {', '.join(get_args(Way))}, a column or "
            f"row also as `column in 3 by 64`{did_you_mean(word, get_args(Way))}"
        )
    parts = tuple(int(part) for part in (match["parts"] or "1").split(":"))
    if len(parts) == 1:
        parts = (1,) * parts[0]
    unit = int(match["unit"] or 1)
    if match["way"] not in _FEATURES and (len(parts) > 1 or unit > 1):
        raise ModelError(f"rule `{pattern}` = `{text}`: only a column or row has parts or heads")
    if not parts or 0 in parts or not unit:
        raise ModelError(f"rule `{pattern}` = `{text}`: parts and heads count from 1")
    return Cut(way=match["way"], parts=parts, unit=unit)  # type: ignore[arg-type]  # seen above


def layer_cuts(layer: nn.Module, name: str, rules: Mapping[str, Cut], *, first: bool) -> LayerCuts:
    """How a layer is cut.

    Args:
        layer: on any device.
        name: its name in the chain.
        rules: ways by pattern of full names, `*` for one part between dots; they go before what
            modules know themselves, and a later one before an earlier one.
        first: whether it takes tokens.
    """
    ways: dict[str, Cut] = {}
    for path, module in layer.named_modules():
        if isinstance(module, Cuttable):
            ways |= {_joined(path, inner): cut for inner, cut in module.cuts().items()}
    for pattern, cut in rules.items():
        ways |= dict.fromkeys(matches(layer, name, pattern, cut), cut)
    return LayerCuts(ways=ways, first=first)


def matches(layer: nn.Module, name: str, pattern: str, cut: Cut) -> Iterator[str]:
    """Paths inside a layer that a rule is for."""
    settings = _counts(layer) if cut.way == "count" else (path for path, _ in layer.named_modules())
    wanted = pattern.split(".")
    for path in settings:
        parts = _joined(name, path).split(".")
        if len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted)):
            yield path


def _counts(layer: nn.Module) -> Iterator[str]:
    """Settings of a layer's modules that are whole numbers."""
    for path, module in layer.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, int) and not isinstance(value, bool):
                yield _joined(path, name)


def _joined(*parts: str) -> str:
    return ".".join(filter(None, parts))
