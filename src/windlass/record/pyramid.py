"""Pyramids: a long series as a few hundred buckets, each with its minimum, median and maximum.

A spike of one step stays visible at any width, because the maximum of a bucket is kept.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

BUCKETS = 500
"""Buckets of a series in the catalogue: about the width in pixels of a chart."""

_Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Curve:
    """A series in buckets of equally many values. A series with fewer values has a bucket each.

    Values have seven digits; a bucket without a finite value is NaN.
    """

    steps: npt.NDArray[np.int64]
    """The first step of each bucket, `Int[bucket]`."""
    low: _Floats
    """The smallest finite value, `Float[bucket]`."""
    median: _Floats
    """The upper median of the finite values."""
    high: _Floats
    """The largest finite value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesSummary:
    """The numbers of a whole series. None where it has no finite value, or the last is none."""

    count: int
    nonfinite: int
    """Values that are NaN or infinite."""
    first_step: int
    last_step: int
    last: float | None
    minimum: float | None
    median: float | None
    maximum: float | None


def bucket_starts(count: int, buckets: int) -> npt.NDArray[np.int64]:
    """Index of the first value of each of at most `buckets` buckets of equally many values."""
    size = max(1, -(-count // buckets))
    return np.arange(0, count, size)


def curve_of(
    steps: npt.NDArray[np.int64], values: npt.NDArray[np.float64], buckets: int = BUCKETS
) -> Curve:
    """The pyramid of a series.

    Args:
        steps: `Int[row]`, in order.
        values: `Float[row]`.
    """
    starts = bucket_starts(len(values), buckets)
    low, median, high = _order_statistics(values, len(starts))
    return Curve(steps=steps[starts], low=low, median=median, high=high)


def coarser(curve: Curve, buckets: int) -> Curve:
    """The same curve in fewer buckets: the median is the median of the medians that join."""
    if len(curve.steps) <= buckets:
        return curve
    starts = bucket_starts(len(curve.steps), buckets)
    return Curve(
        steps=curve.steps[starts],
        low=_order_statistics(curve.low, len(starts))[0],
        median=_order_statistics(curve.median, len(starts))[1],
        high=_order_statistics(curve.high, len(starts))[2],
    )


def summary_of(steps: npt.NDArray[np.int64], values: npt.NDArray[np.float64]) -> SeriesSummary:
    """The numbers of a series that has at least one value."""
    finite = values[np.isfinite(values)]
    last = float(values[-1])
    return SeriesSummary(
        count=len(values),
        nonfinite=len(values) - len(finite),
        first_step=int(steps[0]),
        last_step=int(steps[-1]),
        last=last if np.isfinite(last) else None,
        minimum=float(finite.min()) if len(finite) else None,
        median=float(np.median(finite)) if len(finite) else None,
        maximum=float(finite.max()) if len(finite) else None,
    )


def _order_statistics(
    values: npt.NDArray[np.floating], buckets: int
) -> tuple[_Floats, _Floats, _Floats]:
    """Minimum, upper median and maximum of the finite values of each bucket, `Float[bucket]`."""
    size = -(-len(values) // buckets)
    padded = np.full(buckets * size, np.nan, dtype=np.float32)
    with np.errstate(over="ignore"):
        padded[: len(values)] = values
    padded[~np.isfinite(padded)] = np.nan
    # A sort puts NaN last, so that the finite values of a bucket are its first ones.
    rows = np.sort(padded.reshape(buckets, size), axis=1)
    finite = np.count_nonzero(~np.isnan(rows), axis=1)
    index = np.arange(buckets)
    last = np.maximum(finite - 1, 0)
    return rows[:, 0], rows[index, np.minimum(finite // 2, last)], rows[index, last]
