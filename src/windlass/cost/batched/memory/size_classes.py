"""Size classes: the sizes that device memory is a sum of, and counts of them.

A count says how often a size occurs, as a row of numbers: a column for each layer kind of each of
`SIZES`, and one for each of `OTHERS`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from windlass.cost.arrays import Floats, Ints

SizeCounts = Floats

SIZES = (
    "output",
    "kept",
    "forward",  # peak of a forward pass that saves activations
    "again",  # peak of a forward pass that saves none
    "backward",
    "fresh",
    "largest",  # new gradient beside its sum, if sums are flat or of another precision
    "converted",  # the same if they are of another precision
    "sums",
    "shard",  # part of the sums that is left once they are reduced
    "flat",  # the same if reducing allocates it
    "whole",  # sharded weights, gathered between their first use and their last
)
"""Sizes of each layer kind."""

OTHERS = ("tokens", "lent gradient", "lent weights")

_SMALLER = (
    ("forward", "output"), ("forward", "kept"), ("again", "output"),
    ("fresh", "largest"), ("fresh", "converted"), ("largest", "converted"),
    ("sums", "shard"), ("sums", "flat"), ("shard", "flat"),
)  # fmt: skip
"""Sizes of a layer, each with one that is part of it."""


@dataclass(frozen=True, slots=True)
class KindTraits:
    """What distinguishes layer kinds whatever their sizes."""

    is_embedding: tuple[bool, ...]
    """Whether a kind's gradients are rows of its weights, so that none becomes the accumulated
    gradient."""
    bare: tuple[bool, ...]
    """Whether a kind has no weights of its own."""

    @property
    def width(self) -> int:
        """Number of columns of counts."""
        return len(SIZES) * len(self.bare) + len(OTHERS)

    def columns(self, name: str) -> Ints:
        """The columns of a size, one for each kind, or the single column of one of `OTHERS`."""
        number = len(self.bare)
        if name in SIZES:
            return SIZES.index(name) * number + np.arange(number)
        return np.array([len(SIZES) * number + OTHERS.index(name)])

    def one(self, name: str) -> SizeCounts:
        """A count of one of `OTHERS`."""
        found = np.zeros(self.width)
        found[self.columns(name)] = 1
        return found

    def each(self, name: str, kinds: Ints) -> SizeCounts:
        """A count of a size of each layer, given their kinds, `[layer, column]`."""
        found = np.zeros((len(kinds), self.width))
        found[np.arange(len(kinds)), self.columns(name)[kinds]] = 1
        return found


def columns_of(kinds: Sequence[int], count: int) -> Ints:
    """The columns of some kinds among those of `count` kinds."""
    each = np.arange(len(SIZES))[:, None] * count + np.array(kinds)
    return np.concatenate([each.ravel(), len(SIZES) * count + np.arange(len(OTHERS))])


@lru_cache(maxsize=8)
def in_steps(kinds: KindTraits) -> SizeCounts:
    """Matrix from counts of sizes to counts of steps from one size to the next larger one.

    No step is negative. So if one row has as many as another of every step it is no smaller, even
    if the other has more of a smaller size.
    """
    found = np.eye(kinds.width)
    for larger, smaller in _SMALLER:
        found[kinds.columns(larger), kinds.columns(smaller)] = 1
    return found


@lru_cache(maxsize=8)
def in_sizes(kinds: KindTraits) -> SizeCounts:
    """Matrix from counts of steps back to counts of sizes."""
    return np.asarray(np.rint(np.linalg.inv(in_steps(kinds))))
