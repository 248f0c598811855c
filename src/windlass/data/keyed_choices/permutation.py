"""Keyed random permutations of `range(size)` with random access, without a table."""

import hashlib
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
