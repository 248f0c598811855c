"""Pareto-optimal rows: no other row exceeds them in every count, so only they can be largest."""

from itertools import pairwise

import numpy as np

from windlass.cost.arrays import Floats, Ints


def pareto_rows(counts: Floats | Ints, keys: Ints) -> list[int]:
    """Indices of the rows that no other row of the same key exceeds in all counts, key by key.

    One of several equal rows is kept.

    Args:
        counts: counts, `[row, count]`.
        keys: key of each row, `[row]`.
    """
    order = np.lexsort((-counts.sum(axis=1), keys))
    counts, keys = counts[order][:, counts.any(axis=0)], keys[order]
    begins = np.flatnonzero(np.diff(keys)) + 1
    before = np.tri(_FEW, k=-1, dtype=np.bool_)
    kept = list[int]()
    for begin, end in pairwise((0, *begins.tolist(), len(order))):
        rows, left = counts[begin:end], order[begin:end]
        while len(left) > _FEW:
            kept.append(int(left[0]))
            above = (rows > rows[0]).any(axis=1)
            rows, left = rows[above], left[above]
        if len(left) > 1:
            below = (rows[:, None] <= rows).all(axis=2)
            left = left[~(below & before[: len(left), : len(left)]).any(axis=1)]
        kept += left.tolist()
    return kept


_FEW = 48
"""Rows whose pairs are all compared at once; of more, the largest is first compared with all
others."""
