"""Pieces: which part of each parameter of a layer one slice has."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from windlass.models.tensor_parallel.collectives import Among, Place
from windlass.models.tensor_parallel.sharding_rules import Cut, LayerCuts, Range


class Share(NamedTuple):
    """One of equal parts."""

    at: int = 0
    """Which, from 0."""
    of: int = 1
    """How many there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One slice's part of a parameter."""

    full: tuple[int, ...]
    """Shape of the whole parameter."""
    ranges: tuple[tuple[Range, ...] | None, ...]
    """Along each dimension (start, stop), in the order in which the slice has them; None: all."""
    common: Among | None
    """Which slices have the same, and compute contributions to its gradient, whose sum over them is
    the gradient; None: no other."""

    @property
    def cut(self) -> bool:
        """Whether it is less than the whole."""
        return any(ranges is not None for ranges in self.ranges)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the slice's part."""
        return tuple(
            size if ranges is None else sum(stop - start for start, stop in ranges)
            for size, ranges in zip(self.full, self.ranges, strict=True)
        )

    def of(self, full: Tensor) -> Tensor:
        """The slice's part: a view of the whole wherever it lies in one range of each dimension."""
        for dim, ranges in enumerate(self.ranges):
            if ranges is not None:
                parts = [full.narrow(dim, start, stop - start) for start, stop in ranges]
                full = parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)
        return full

    def into(self, full: Tensor, local: Tensor) -> None:
        """Writes the slice's part into the whole."""
        _put(full, local, self.ranges)


def _put(full: Tensor, local: Tensor, ranges: Sequence[tuple[Range, ...] | None]) -> None:
    """Writes a part into the whole, one dimension after the other from the last on."""
    if not ranges:
        full.copy_(local)
        return
    dim, at = len(ranges) - 1, 0
    for start, stop in ranges[-1] or ((0, full.shape[dim]),):
        own = stop - start
        _put(full.narrow(dim, start, own), local.narrow(dim, at, own), ranges[:-1])
        at += own


def pieces(layer: nn.Module, cuts: LayerCuts, place: Place) -> dict[str, Piece]:
    """How each parameter of a layer is cut.

    In two dimensions a column has the outputs of all slices of its row, for their own features; a
    row the inputs of all of its row, in their order, for its own features; a map its own features
    for all outputs; a norm its own features. Tables and the head's outputs are cut over all slices
    as in one dimension.

    Args:
        layer: the whole layer, on any device.
        cuts: of the layer.
        place: of the slice.

    Returns:
        Pieces by the parameter's name inside the layer.
    """
    normed = frozenset(norms(layer, cuts)) if place.columns > 1 else frozenset()
    found: dict[str, Piece] = {}
    for name, parameter in layer.named_parameters(remove_duplicate=False):
        path, _, leaf = name.rpartition(".")
        shape = tuple(parameter.shape)
        if path in normed:
            found[name] = _of_features(shape, place)
        else:
            share = inner(layer, cuts, path, place)
            found[name] = _piece(shape, cuts.ways.get(path), leaf, place, share)
    return found


def norms(layer: nn.Module, cuts: LayerCuts) -> Iterator[str]:
    """Paths of torch's norms over the features that slices of one row share out.

    All but those inside a region over fewer of them: of heads, say, which each slice has whole.
    """
    width = _width(layer, cuts)
    for path, module in layer.named_modules():
        if isinstance(module, (nn.LayerNorm, nn.RMSNorm)) and not cuts.first:
            shape = tuple(module.normalized_shape)
            if shape == (width,) or (cuts.region(path) is None and len(shape) == 1):
                yield path


def _width(layer: nn.Module, cuts: LayerCuts) -> int | None:
    """Features between layers, as the first column takes them; None of a layer without one."""
    columns = (layer.get_submodule(at) for at, cut in cuts.ways.items() if cut.way == "column")
    return next((m.in_features for m in columns if isinstance(m, nn.Linear)), None)


def _piece(shape: tuple[int, ...], cut: Cut | None, leaf: str, place: Place, share: Share) -> Piece:
    """Of a parameter `leaf` of a linear map or table, of whose cut features it has a share."""
    uncut = Piece(full=shape, ranges=(None,) * len(shape), common="all")
    if cut is not None and cut.way == "map" and place.columns > 1:
        return _of_features(shape, place)
    if cut is None or cut.way not in ("column", "row", "vocabulary"):
        return uncut
    if cut.way == "vocabulary" or (cut.way == "column" and len(shape) == 1):
        own = cut.ranges(shape[0], share.of, share.at)
        common: Among | None = None if share.of == place.degree else "features"
        return Piece(full=shape, ranges=(own, *uncut.ranges[1:]), common=common)
    if leaf == "weight":
        outputs, inputs = shape
        ranges: tuple[tuple[Range, ...] | None, ...]
        if cut.way == "column":
            ranges = (_of_row(cut, outputs, place, share), _own(inputs, place))
        else:
            ranges = (_own(outputs, place), _of_row(cut, inputs, place, share))
        return Piece(full=shape, ranges=ranges, common=None)
    return uncut if place.columns == 1 else _of_features(shape, place)


def _of_features(shape: tuple[int, ...], place: Place) -> Piece:
    """Of a parameter with a last dimension of features: those of its column have the same."""
    common: Among | None = "tokens" if place.rows > 1 else None
    whole = (None,) * (len(shape) - 1)
    return Piece(full=shape, ranges=(*whole, _own(shape[-1], place)), common=common)


def _of_row(cut: Cut, total: int, place: Place, share: Share) -> tuple[Range, ...]:
    """What all slices of one row have of the cut features, slice after slice if they share them."""
    if share.of != place.degree:
        return cut.ranges(total, share.of, share.at)
    first = place.row * place.columns
    found: list[Range] = []
    for index in range(first, first + place.columns):
        for start, stop in cut.ranges(total, place.degree, index):
            if found and found[-1][1] == start:
                found[-1] = (found[-1][0], stop)
            else:
                found.append((start, stop))
    return tuple(found)


def _own(total: int, place: Place) -> tuple[Range, ...] | None:
    """The slice's own share of the features between layers; None: all of them."""
    if place.columns == 1:
        return None
    own = total // place.columns
    return ((place.column * own, (place.column + 1) * own),)


def inner(layer: nn.Module, cuts: LayerCuts, path: str, place: Place) -> Share:
    """The slice's share of the features that are cut at a path: between a region's column and row.

    They are shared out over all slices. Where heads do not divide by a grid's slices, but do by its
    rows, all slices of one row have those of the row, and compute the same.

    Args:
        layer: whole, on any device.
        cuts: of the layer.
        path: of a module or setting that is cut.
        place: of the slice.
    """
    region = cuts.region(path)
    if place.columns > 1 and region is not None and not _divides(layer, cuts, region, place.degree):
        return Share(place.row, place.rows)
    return Share(place.index, place.degree)


def _divides(layer: nn.Module, cuts: LayerCuts, region: str, parts: int) -> bool:
    """Whether all that is cut inside a region can be cut in so many equal parts."""
    return all(
        _parts_equally(layer, path, cut, parts)
        for path, cut in cuts.ways.items()
        if cuts.region(path) == region
    )


def _parts_equally(layer: nn.Module, path: str, cut: Cut, parts: int) -> bool:
    if cut.way == "count":
        holder, _, name = path.rpartition(".")
        return bool(getattr(layer.get_submodule(holder), name) % parts == 0)
    module = layer.get_submodule(path)
    if cut.way not in ("column", "row") or not isinstance(module, nn.Linear):
        return True
    total = module.out_features if cut.way == "column" else module.in_features
    return cut.fault(total, parts) is None
