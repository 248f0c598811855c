"""Which source each training sample is taken from, with random access and exact shares."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from windlass.data.keyed_choices.permutation import Indices, by_group, keyed_permutation
from windlass.errors import DataError

_BLOCK = 1000
"""Samples in which each source has its exact share; weights are rounded to a thousandth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceMixture:
    """Shares of the training samples, in each block of 1,000 consecutive samples.

    A keyed permutation of the positions of a block gives each source the positions whose image lies
    in the source's range. So both the source of a sample and the number of the source's earlier
    samples follow from the sample's index alone.
    """

    shares: tuple[int, ...]
    """Samples of each source in a block; with one source there are no blocks."""
    seed: int

    def locate(self, samples: Indices) -> tuple[Indices, Indices]:
        """The source of each sample, and which of the source's samples it is.

        Args:
            samples: indices of samples over the whole run, from 0, `Int[sample]`.

        Returns:
            Indices of sources, and indices into the source's own samples, both `Int[sample]`. Each
            source's indices occur exactly once over a run of whole blocks.
        """
        if len(self.shares) == 1:
            return np.zeros_like(samples), samples
        blocks, positions = np.divmod(samples, _BLOCK)

        def images_in(block: int, places: Indices) -> Indices:
            # Four numbers, where the key of an epoch's order has two or three.
            return keyed_permutation(_BLOCK, self.seed, block, 0, 0)(places)

        images = by_group(blocks, positions, images_in)
        firsts = np.array([0, *accumulate(self.shares)])
        sources = np.searchsorted(firsts, images, side="right") - 1
        return sources, blocks * np.array(self.shares)[sources] + images - firsts[sources]


def source_mixture(weights: Sequence[float], seed: int) -> SourceMixture:
    """The mixture whose shares are nearest to weights, at least a thousandth each.

    Args:
        weights: relative weights, each above 0.

    Raises:
        DataError: there are more sources than samples in a block.
    """
    if len(weights) > _BLOCK:
        raise DataError(f"{len(weights)} sources; at most {_BLOCK} can be mixed")
    exact = np.array(weights, dtype=np.float64)
    exact *= _BLOCK / exact.sum()
    shares = np.maximum(1, np.floor(exact)).astype(np.int64)
    # The largest remainders get what is left; the largest shares give what tiny ones take too much.
    while (missing := _BLOCK - int(shares.sum())) != 0:
        excess = np.where(shares > 1, shares - exact, -np.inf) if missing < 0 else exact - shares
        shares[np.argmax(excess)] += np.sign(missing)
    return SourceMixture(shares=tuple(shares.tolist()), seed=seed)
