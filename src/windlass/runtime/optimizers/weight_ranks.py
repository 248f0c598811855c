"""The ranks that hold parts of the same weights, as an update asks them for whole weights."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from windlass.runtime.parameters import MasterParameter


class WeightRanks(Protocol):
    """The ranks that hold parts of a layer's weights, this one among them.

    All of them call each method alike, for the same layers in the same order.
    """

    def sum(
        self, own: Mapping[str, Tensor], length: Callable[[tuple[int, ...]], int]
    ) -> Mapping[str, Tensor]:
        """Sums over all parts of each weight.

        Args:
            own: what this rank's part of each weight contributes, `Float[n]` by full name.
        """

    @property
    def matrices(self) -> Sequence[str]:
        """Full names of all matrices of the layer that are updated whole, in order."""

    def gather(self, name: str, own: Tensor | None) -> Tensor:
        """A whole matrix, `[rows columns]`.

        Args:
            own: this rank's part; None for zeros.
        """

    def part(self, name: str, full: Tensor) -> Tensor:
        """This rank's part of a whole matrix, in the shape of its weight here."""


class SingleRank:
    """A rank that holds whole weights."""

    def __init__(self, weights: Sequence[MasterParameter]) -> None:
        self.matrices = [weight.name for weight in weights if weight.matrix]

    def sum(
        self, own: Mapping[str, Tensor], length: Callable[[tuple[int, ...]], int]
    ) -> Mapping[str, Tensor]:
        """The contributions themselves."""
        del length
        return own

    def gather(self, name: str, own: Tensor | None) -> Tensor:
        """The matrix itself."""
        if own is None:
            raise ValueError(f"`{name}` has no update, and no other rank has parts of it")
        return own

    def part(self, name: str, full: Tensor) -> Tensor:
        """The matrix itself."""
        del name
        return full
