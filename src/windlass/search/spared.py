"""Spared: of plans that fit only with layers computed again, those with as few as do, by stage.

What a stage holds depends on its own layers only, so that all stages of all plans are searched at
once, by halving. The more of them, the longer a step: of all plans that are the same but for these
numbers the one with all of them smallest is the fastest.
"""

from dataclasses import replace
from itertools import pairwise

import numpy as np

from windlass.cost.closed import Totals, stage_bytes, step_seconds
from windlass.cost.closed_layers import Chain, Floats, Ints
from windlass.cost.closed_rows import Rows
from windlass.search.field import Cell


def twins(rows: Rows) -> Ints:
    """Of each plan with layers computed again the place of the same plan without; else -1."""
    again = np.array([any(each) for each in rows.agains])[rows.again][rows.run]
    key = rows.setting[rows.run] * (rows.micros.max() + 1) + rows.micros[rows.run]
    key = key * len(rows.pairs) + rows.pair
    found = np.full(rows.count, -1)
    without = np.flatnonzero(~again)
    if without.size:
        without = without[np.argsort(key[without])]
        at = np.minimum(np.searchsorted(key[without], key), len(without) - 1)
        same = again & (key[without][at] == key)
        found[same] = without[at[same]]
    return found


def spared(chain: Chain, cell: Cell, near_bytes: float, far_full: Floats) -> tuple[Cell, Totals]:
    """Plans that fit with all layers computed again, with as few on each stage as fit.

    Args:
        chain: with prices of layers.
        cell: the plans.
        near_bytes: that each fits into.
        far_full: of each the share of the tier beyond that it takes.
    """
    rows, shape = cell.rows, cell.shape
    most = _most(cell)
    low, high = (
        np.zeros((rows.count, shape.pipeline), dtype=np.int64),
        np.tile(most, (rows.count, 1)),
    )
    taken = np.full(low.shape, np.nan)
    middle = low.copy()
    while (open_ := low < high).any() or np.isnan(taken).any():
        open_ |= np.isnan(taken)
        for count in np.unique(middle[open_]):
            asked = open_ & (middle == count)
            needed = asked.any(axis=1)
            nbytes = np.full(low.shape, np.nan)
            tried = _counted(rows.only(needed), (int(count),) * shape.pipeline)
            nbytes[needed] = stage_bytes(chain, shape, cell.ends, tried)
            fits = asked & (nbytes <= near_bytes)
            taken[fits], high[fits] = nbytes[fits], count
            fails = asked & ~fits
            low[fails] = np.minimum(count + 1, high[fails])
            last = fails & (count == most)  # by rounding only, since it was said to fit
            taken[last] = nbytes[last]
        middle = (low + high) // 2
    agains, again = np.unique(low, axis=0, return_inverse=True)
    found = _each(rows, [tuple(map(int, each)) for each in agains], again.reshape(-1))
    cell = Cell(shape, cell.ends, found)
    seconds = step_seconds(chain, shape, cell.ends, found)
    return cell, Totals(step_seconds=seconds, peak_bytes=taken.max(axis=1), far_full=far_full)


def _most(cell: Cell) -> Ints:
    """The most layers of a chunk of each stage that can be computed again."""
    end = cell.ends[-1] - 1
    able = np.array([min(last, end) - max(first, 1) for first, last in pairwise(cell.ends)])
    return np.asarray(np.maximum(0, able.reshape(-1, cell.shape.pipeline)).max(axis=0))


def _counted(rows: Rows, again: tuple[int, ...]) -> Rows:
    """The same plans with so many layers computed again."""
    return replace(rows, agains=(again,), again=np.zeros_like(rows.again))


def _each(rows: Rows, agains: list[tuple[int, ...]], again: Ints) -> Rows:
    """The same plans, each with an own one of some numbers of layers computed again."""
    both = rows.run * len(agains) + again
    runs, run = np.unique(both, return_inverse=True)
    of, counts = np.divmod(runs, len(agains))
    return replace(
        rows,
        agains=tuple(agains),
        block=rows.block[of],
        setting=rows.setting[of],
        micros=rows.micros[of],
        again=counts,
        run=run,
    )
