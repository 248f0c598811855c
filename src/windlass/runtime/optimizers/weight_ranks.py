"""The ranks that hold parts of the same weights, as an update asks them for whole weights."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor


class WeightRanks(Protocol):
    """The ranks that hold parts of a layer's weights, this one among them.

    All of them call each method alike, for the same layers in the same order.
    """

    def sum(self, own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Sums over all parts of each weight.

        Args:
            own: what this rank's part of each weight contributes, by full name.
        """


class SingleRank:
    """A rank that holds whole weights."""

    def sum(self, own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The contributions themselves."""
        return own
