"""Change points of a run: the steps from which on a step takes longer, or shorter, than before.

Steps of a training run are no independent draws: one is slow because the one before was. So all
tests are made on medians of blocks of 20 steps. On single steps the same tests alarm in 20 to 100 %
of clean runs.

Source of the method: e-divisive splits (Matteson & James 2014, JASA 109(505)), which a t-test
merges again in place of permutations (Hunter, Fleming et al. 2023, arXiv:2301.03034).
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from windlass.judge.moderated_t import NoisePrior, robust_deviation, t_survival

BLOCK_STEPS = 20
WARM_UP_STEPS = 5
"""The first steps of a run or of an attempt fill caches and are left out."""
SMALLEST_CHANGE = 0.03
"""Changes of less than 3 % are no changes."""
_LARGEST_P = 1e-4
_FEWEST_BLOCKS = 2
_INFLATION, _PRIOR_FREEDOM = 2.0, 4.0
"""A few blocks may be equal by chance. So what the noise of single steps lets expect counts too,
twice it since steps are no independent draws, as a prior of so many degrees of freedom."""
_MOST_BLOCKS = 100
"""A longer run has longer blocks, so that the table of distances between all of them is small."""

Series = npt.NDArray[np.float64]
"""One number for each step or block, `Float[step]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change of the level of a series."""

    index: int
    """Index in the series of the first value after the change."""
    before: float
    """Median of the values since the change before it, or since the beginning."""
    after: float
    """Median of the values up to the next change, or to the end."""

    @property
    def magnitude(self) -> float:
        """The change as a share of the level before it; negative if the level fell."""
        return self.after / self.before - 1


def change_points(
    values: Series, *, least: float = SMALLEST_CHANGE, scale: Series | float | None = None
) -> tuple[Change, ...]:
    """The changes of level of a series of positive numbers, in order.

    Args:
        values: one number for each step, without those of the warm-up.
        least: smallest change, as a share of `scale`.
        scale: what a change is measured by; None means the median of `values`.
    """
    size = block_size(len(values))
    blocks = block_medians(values, size)
    if len(blocks) < 2 * _FEWEST_BLOCKS:
        return ()
    unit = float(np.median(values if scale is None else scale))
    prior = NoisePrior(_INFLATION * _median_deviation(values, size), _PRIOR_FREEDOM)
    splits = sorted(_splits(np.abs(blocks[:, None] - blocks[None, :]), 0, len(blocks)))
    while splits:
        ends = [0, *splits, len(blocks)]
        levels = [blocks[first:last] for first, last in pairwise(ends)]
        tests = [_p(a, b, prior, least * unit) for a, b in pairwise(levels)]
        weakest = int(np.argmax(tests))
        if tests[weakest] <= _LARGEST_P:
            break
        del splits[weakest]
    starts = [_refined(values, split * size, size) for split in splits]
    ends = [0, *starts, len(values)]
    medians = [float(np.median(values[first:last])) for first, last in pairwise(ends)]
    return tuple(
        Change(index=start, before=before, after=after)
        for start, (before, after) in zip(starts, pairwise(medians), strict=True)
    )


def likeliest_change(values: Series) -> int:
    """Where two levels fit the values best; it is no proof that there are two.

    Values count up to twice the median, so that a stall is no level.
    """
    clipped = np.minimum(values, 2 * np.median(values))
    sums, count = np.cumsum(clipped), len(clipped)
    left = np.arange(1, count)
    means = sums[:-1] / left - (sums[-1] - sums[:-1]) / (count - left)
    return int(np.argmax(left * (count - left) * means**2)) + 1


def block_size(count: int) -> int:
    """Steps of a block in a series of `count` steps: 20, or more in a long run."""
    return max(BLOCK_STEPS, math.ceil(count / _MOST_BLOCKS))


def block_medians(values: Series, size: int = BLOCK_STEPS) -> Series:
    """Medians of consecutive blocks, `Float[block]`; a last incomplete block is left out."""
    count = len(values) // size
    medians: Series = np.median(values[: count * size].reshape(count, size), axis=1)
    return medians


def stall_share(values: Series) -> float:
    """The share of steps that take more than twice the median of their block."""
    if not len(values):
        return 0.0
    size = min(block_size(len(values)), len(values))
    medians = block_medians(values, size)
    of_step = medians[np.minimum(np.arange(len(values)) // size, len(medians) - 1)]
    return float(np.mean(values > 2 * of_step))


def _splits(distances: Series, first: int, last: int) -> list[int]:
    """All splits of blocks `first` to `last`, each the best one of its segment; unproven."""
    if last - first < 2 * _FEWEST_BLOCKS:
        return []
    split = first + _best_split(distances[first:last, first:last])
    return [*_splits(distances, first, split), split, *_splits(distances, split, last)]


def _best_split(distances: Series) -> int:
    """Where the energy distance between both sides is largest: `mn/(m+n) (2 AB - AA - BB)`.

    Args:
        distances: absolute differences of all pairs of blocks, `Float[block block]`.
    """
    count = len(distances)
    sums = np.cumsum(np.cumsum(distances, axis=0), axis=1)
    m = np.arange(_FEWEST_BLOCKS, count - _FEWEST_BLOCKS + 1)
    n = count - m
    left = sums[m - 1, m - 1]
    across = sums[m - 1, -1] - left
    right = sums[-1, -1] - left - 2 * across
    energy = 2 * across / (m * n) - left / (m * m) - right / (n * n)
    return int(m[np.argmax(energy * m * n / count)])


def _p(before: Series, after: Series, prior: NoisePrior, least: float) -> float:
    """Two-sided p of the difference of two levels, by a moderated t; 1 if it is below `least`."""
    difference = abs(float(np.median(after) - np.median(before)))
    m, n = len(before), len(after)
    squares = ((before - before.mean()) ** 2).sum() + ((after - after.mean()) ** 2).sum()
    freedom = m + n - 2 + prior.freedom
    deviation = math.sqrt((squares + prior.freedom * prior.deviation**2) / freedom)
    if difference <= max(least, 2 * deviation):
        return 1.0
    spread = deviation * math.sqrt(1 / m + 1 / n)
    return 2 * t_survival(difference / spread if spread else math.inf, freedom)


def _median_deviation(values: Series, size: int) -> float:
    """Deviation of the median of independent steps: `1.25 s / sqrt(size)`."""
    steps = np.diff(values) / math.sqrt(2)
    return 1.25 * robust_deviation(steps)[0] / math.sqrt(size)


def _refined(values: Series, start: int, size: int) -> int:
    """The step of a change that is known to a block: where two levels fit best around it."""
    first, last = max(0, start - 2 * size), min(len(values), start + 2 * size)
    window = values[first:last]
    before, after = np.median(values[first:start]), np.median(values[start:last])
    closer_to_after = np.abs(window - after) - np.abs(window - before)
    cost = np.cumsum(-closer_to_after)
    return first + int(np.argmin(cost)) + 1
