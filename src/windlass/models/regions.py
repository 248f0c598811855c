"""Regions: which part of what is cut inside one each slice has."""

from typing import NamedTuple

from torch import nn

from windlass.models.cuts import Cut, LayerCuts
from windlass.models.exchange import Place


class Share(NamedTuple):
    """One of equal parts."""

    at: int = 0
    """Which, from 0."""
    of: int = 1
    """How many there are."""


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
