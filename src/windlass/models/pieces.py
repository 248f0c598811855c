"""Pieces: which part of each parameter of a layer one slice has."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from windlass.models.cuts import Cut, LayerCuts
from windlass.models.exchange import Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One slice's part of a parameter."""

    full: tuple[int, ...]
    """Shape of the whole parameter."""
    dim: int | None
    """Along which it is cut; None: every slice has it whole, and computes contributions to its
    gradient, whose sum over the slices is the gradient."""
    ranges: tuple[tuple[int, int], ...] = ()
    """(start, stop) along `dim`, in order."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the slice's part."""
        if self.dim is None:
            return self.full
        own = sum(stop - start for start, stop in self.ranges)
        return (*self.full[: self.dim], own, *self.full[self.dim + 1 :])

    def of(self, full: Tensor) -> Tensor:
        """The slice's part: a view of the whole wherever it lies in one range."""
        if self.dim is None:
            return full
        parts = [full.narrow(self.dim, start, stop - start) for start, stop in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=self.dim)

    def into(self, full: Tensor, local: Tensor) -> None:
        """Writes the slice's part into the whole."""
        if self.dim is None:
            full.copy_(local)
            return
        at = 0
        for start, stop in self.ranges:
            own = stop - start
            full.narrow(self.dim, start, own).copy_(local.narrow(self.dim, at, own))
            at += own


def pieces(layer: nn.Module, cuts: LayerCuts, place: Place) -> dict[str, Piece]:
    """How each parameter of a layer is cut.

    Args:
        layer: the whole layer, on any device.
        cuts: of the layer.
        place: of the slice.

    Returns:
        Pieces by the parameter's name inside the layer.
    """
    found: dict[str, Piece] = {}
    for name, parameter in layer.named_parameters(remove_duplicate=False):
        path, _, leaf = name.rpartition(".")
        shape = tuple(parameter.shape)
        cut = cuts.ways.get(path)
        dim = None if cut is None else _dim(cut, leaf)
        if cut is None or dim is None:
            found[name] = Piece(full=shape, dim=None)
        else:
            ranges = cut.ranges(shape[dim], place.degree, place.index)
            found[name] = Piece(full=shape, dim=dim, ranges=ranges)
    return found


def _dim(cut: Cut, leaf: str) -> int | None:
    """Along which a linear map's or table's own parameter is cut; None for not at all."""
    if cut.way == "row":
        return 1 if leaf == "weight" else None
    return 0 if cut.way in ("column", "vocabulary") else None
