"""Keyed random permutations of `range(size)` with random access, without a table."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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
        step: step, counted from 1.
        first: index of the first sample in the global batch, from 0.
        count: number of samples.
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
