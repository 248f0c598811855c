"""Keyed random permutations of `range(size)` with random access, without a table."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from windlass.errors import DataError

_ROUNDS = 8
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Permutation:
    """A pseudo-random order of `range(size)`: a Feistel network over the next power of 4.

    A value outside `range(size)` is permuted again until it is inside (cycle walking), which keeps
    the map one to one and takes at most 4 rounds on average.

    Source: Black and Rogaway 2002, "Ciphers with arbitrary finite domains", method 2.
    """

    size: int
    keys: tuple[int, ...]

    def __call__(self, indices: Indices) -> Indices:
        """The permuted value of each index in `range(size)`."""
        half = max(1, ((self.size - 1).bit_length() + 1) // 2)
        values = self._permute(indices.astype(np.uint64), half)
        while (outside := values >= self.size).any():
            values[outside] = self._permute(values[outside], half)
        return values.astype(np.int64)

    def _permute(self, values: npt.NDArray[np.uint64], half: int) -> npt.NDArray[np.uint64]:
        shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
        left, right = values >> shift, values & mask
        for key in self.keys:
            left, right = right, left ^ (_mixed(right, key) & mask)
        return (left << shift) | right


def keyed_permutation(size: int, *key: int) -> Permutation:
    """The permutation of `range(size)` for a key, the same on every machine."""
    digest = _digest("permutation", *key)
    keys = tuple(int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(_ROUNDS))
    return Permutation(size=size, keys=keys)


def epoch_places(indices: Indices, size: int, *key: int) -> Indices:
    """The places of indices in the orders of their epochs, each of which has its own.

    Args:
        indices: counted over all epochs, `Int[n]`.
        key: of the order of epoch e, which is that of the key with e behind it.
    """
    epochs, within = np.divmod(indices, size)
    return by_group(epochs, within, lambda epoch, own: keyed_permutation(size, *key, epoch)(own))


def by_group(
    groups: Indices, indices: Indices, places: Callable[[int, Indices], Indices]
) -> Indices:
    """`places(group, indices)` of the indices of each group, at the places of these, `Int[n]`."""
    found = np.empty_like(indices)
    for group in np.unique(groups).tolist():
        own = groups == group
        found[own] = places(group, indices[own])
    return found


def sample_indices(step: int, first: int, count: int, batch: int) -> Indices:
    """Indices over the whole run of consecutive samples of a step, `Int[count]`.

    Args:
        first: index of the first sample in the global batch, from 0.
        batch: global batch in samples.
    """
    if step < 1 or first < 0 or count < 0 or first + count > batch:
        raise ValueError(f"no samples {first} to {first + count} in step {step} of {batch} samples")
    return (step - 1) * batch + first + np.arange(count, dtype=np.int64)


def keyed_number(below: int, *key: int) -> int:
    """A pseudo-random number in `range(below)` for a key, the same on every machine."""
    return int.from_bytes(_digest("number", *key)[:16], "little") % below


def _digest(purpose: str, *key: int) -> bytes:
    return hashlib.blake2b(
        repr((purpose, *map(int, key))).encode(), digest_size=8 * _ROUNDS
    ).digest()


def _mixed(values: npt.NDArray[np.uint64], key: int) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014) of `values + key`."""
    mixed = values + np.uint64(key)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


TokenRow = npt.NDArray[np.int64]
"""Token ids `Int[s]` of one sequence."""

_TARGET_SHARE = 0.15
"""Share of a sequence's tokens that are targets."""
_MASKED_SHARE, _RANDOM_SHARE = 0.8, 0.1
"""Shares of the targets that become the mask token and a random token; the rest are unchanged.
Source: Devlin et al. 2018, arXiv:1810.04805, section 3.1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MlmMasking:
    """Masks the same number of tokens in every sequence, at positions that follow from a key.

    So a mean over sequences is a mean over tokens.
    """

    mask_token: int
    """Id of the mask token, which is not one of the tokenizer's."""
    vocabulary: int
    """Number of the tokenizer's entries, from which random tokens are drawn."""
    ignore_index: int
    """Target of a token that is not predicted."""

    def target_counts(self, lengths: TokenRow) -> TokenRow:
        """Number of targets of sequences of such lengths; at least one each."""
        counts: TokenRow = np.rint(_TARGET_SHARE * lengths).astype(np.int64)
        return counts.clip(min=1)

    def masked_positions(self, length: int, *key: int) -> TokenRow:
        """Unordered positions of the targets in a sequence of `length` tokens; at least one."""
        count = int(self.target_counts(np.array(length)))
        return keyed_permutation(length, *key)(np.arange(count, dtype=np.int64))

    def mask(self, row: TokenRow, *key: int) -> tuple[TokenRow, TokenRow]:
        """A sequence with masked tokens, and its targets `Int[s]`."""
        positions = self.masked_positions(len(row), *key)
        inputs, targets = row.copy(), np.full_like(row, self.ignore_index)
        targets[positions] = row[positions]
        masked = round(_MASKED_SHARE * len(positions))
        randomized = round(_RANDOM_SHARE * len(positions))
        inputs[positions[:masked]] = self.mask_token
        for position in positions[masked : masked + randomized].tolist():
            inputs[position] = keyed_number(self.vocabulary, *key, position)
        return inputs, targets


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
