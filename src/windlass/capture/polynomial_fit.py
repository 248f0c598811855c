"""Finds a count's polynomial in micro-batch and sequence from a few measured points, exactly."""

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

from windlass.schema.graph import Polynomial

FIT_MICROBATCHES = (2, 3)
"""Two suffice for what is linear in the micro-batch; one would make special cases of size 1."""


def fit_polynomial(values: Mapping[tuple[int, int], int], sequences: Sequence[int]) -> Polynomial:
    """The polynomial through the values at `MICROS` x three sequences.

    Args:
        values: at (micro-batch, sequence); further points are not looked at.
        sequences: three different lengths.
    """
    low, high = FIT_MICROBATCHES
    slopes = [Fraction(values[high, s] - values[low, s], high - low) for s in sequences]
    fixed = [values[low, s] - low * slope for s, slope in zip(sequences, slopes, strict=True)]
    one, s, ss = _parabola(sequences, fixed)
    b, bs, bss = _parabola(sequences, slopes)
    return Polynomial(one=one, s=s, ss=ss, b=b, bs=bs, bss=bss)


def sum_quantities(quantities: Iterable[Polynomial]) -> Polynomial:
    """The sum; zero of none."""
    return Polynomial(*(sum(terms) for terms in zip(Polynomial(), *quantities, strict=True)))


def _parabola(places: Sequence[int], values: Sequence[Fraction]) -> tuple[float, float, float]:
    """Coefficients of `c0 + c1 x + c2 x^2` through three points, by divided differences."""
    x0, x1, x2 = places
    y0, y1, y2 = values
    first = Fraction(y1 - y0) / (x1 - x0)
    second = (Fraction(y2 - y1) / (x2 - x1) - first) / (x2 - x0)
    slope = first - second * (x0 + x1)
    return float(y0 - slope * x0 - second * x0 * x0), float(slope), float(second)
