"""Fits a count exactly as a polynomial of micro-batch and sequence from a few measured points."""

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

from windlass.schema import Polynomial

FIT_MICRO_BATCHES = (2, 3)
"""Two sizes suffice for what is linear in the micro-batch; size 1 would be a special case."""


def fit_polynomial(values: Mapping[tuple[int, int], int], sequences: Sequence[int]) -> Polynomial:
    """The polynomial through the values at `FIT_MICRO_BATCHES` x three sequences.

    Args:
        values: values by (micro-batch, sequence); further points are ignored.
        sequences: three different lengths, or three times the only one.
    """
    low, high = FIT_MICRO_BATCHES
    if len(set(sequences)) == 1:
        first, second = (values[each, sequences[0]] for each in (low, high))
        return Polynomial(
            constant=float(Fraction(high * first - low * second, high - low)),
            b=float(Fraction(second - first, high - low)),
        )
    slopes = [Fraction(values[high, s] - values[low, s], high - low) for s in sequences]
    fixed = [values[low, s] - low * slope for s, slope in zip(sequences, slopes, strict=True)]
    constant, s, ss = _parabola(sequences, fixed)
    b, bs, bss = _parabola(sequences, slopes)
    return Polynomial(constant=constant, s=s, ss=ss, b=b, bs=bs, bss=bss)


def sum_polynomials(polynomials: Iterable[Polynomial]) -> Polynomial:
    """The sum of polynomials; zero if there are none."""
    first, *others = (*polynomials,) or (Polynomial(),)
    return first.plus(*others) if others else first


def _parabola(xs: Sequence[int], ys: Sequence[Fraction]) -> tuple[float, float, float]:
    """Coefficients of `c0 + c1 x + c2 x^2` through three points, by divided differences."""
    x0, x1, x2 = xs
    y0, y1, y2 = ys
    first = Fraction(y1 - y0) / (x1 - x0)
    second = (Fraction(y2 - y1) / (x2 - x1) - first) / (x2 - x0)
    slope = first - second * (x0 + x1)
    return float(y0 - slope * x0 - second * x0 * x0), float(slope), float(second)
