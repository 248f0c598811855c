"""Order: how many pairs of runs that lie apart are predicted in the order they were measured."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from windlass.cost.formulas import Column

_Ints = NDArray[np.int64]


class Pairs(NamedTuple):
    """Pairs of runs whose times differ by more than they are told apart by."""

    ordered: float
    """Predicted in the order that they were measured; a pair predicted alike counts a half."""
    apart: int
    """All of them."""


def pairs_ordered(measured: Column, predicted: Column, apart: float) -> Pairs:
    """Counts the pairs whose measured times differ by more than a factor of `exp(apart)`.

    Takes `n log^2 n` steps for n runs, not n^2: a table may have 100,000 of one group.
    """
    by_time = np.argsort(measured)
    times = np.log(measured[by_time])
    _, place = np.unique(predicted[by_time], return_inverse=True)
    faster = np.searchsorted(times, times - apart)
    less, not_more = (_below(place, faster, equal=equal) for equal in (False, True))
    return Pairs(ordered=float((less + not_more).sum()) / 2.0, apart=int(faster.sum()))


def _below(values: _Ints, firsts: _Ints, *, equal: bool) -> _Ints:
    """For each value how many of the first `firsts` values are below it.

    The first k values are blocks of powers of two, one for each bit of k; in each, sorted, a place
    is looked up.

    Args:
        values: 0 to their number less one.
        firsts: how many of the first values each is compared with.
        equal: whether equal ones count too.
    """
    count = len(values)
    found = np.zeros(count, dtype=np.int64)
    size = 1
    while size <= count:
        blocks = np.sort(np.arange(count) // size * count + values)
        asking = np.flatnonzero(firsts & size)
        block = firsts[asking] // (2 * size) * 2
        asked = block * count + values[asking]
        places = np.searchsorted(blocks, asked, side="right" if equal else "left")
        found[asking] += places - block * size
        size *= 2
    return found
