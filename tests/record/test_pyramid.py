"""A pyramid keeps the smallest, the middle and the largest of what it leaves out."""

import statistics

import numpy as np
from hypothesis import given, strategies as st

from windlass.record.pyramid import coarser, curve_of, summary_of

FLOATS = st.lists(st.floats(width=32), min_size=1, max_size=80)


@given(FLOATS, st.integers(1, 90))
def test_each_bucket_has_the_order_statistics_of_its_finite_values(
    numbers: list[float], buckets: int
):
    values, steps = np.array(numbers, dtype=float), np.arange(10, 10 + len(numbers))
    curve = curve_of(steps, values, buckets)
    size = -(-len(values) // buckets)
    assert len(curve.steps) <= buckets
    for index, start in enumerate(range(0, len(values), size)):
        finite = [v for v in numbers[start : start + size] if np.isfinite(v)]
        assert curve.steps[index] == 10 + start
        got = (curve.low[index], curve.median[index], curve.high[index])
        if finite:
            assert got == (min(finite), statistics.median_high(finite), max(finite))
        else:
            assert np.isnan(got).all()


@given(FLOATS, st.integers(1, 90))
def test_a_coarser_curve_lies_between_the_same_bounds(numbers: list[float], buckets: int):
    values, steps = np.array(numbers, dtype=float), np.arange(len(numbers))
    fine = curve_of(steps, values)
    coarse = coarser(fine, buckets)
    assert len(coarse.steps) <= buckets
    np.testing.assert_array_equal(np.fmin.reduce(coarse.low), np.fmin.reduce(fine.low))
    np.testing.assert_array_equal(np.fmax.reduce(coarse.high), np.fmax.reduce(fine.high))


@given(FLOATS)
def test_the_summary_of_a_series_leaves_out_what_is_not_finite(numbers: list[float]):
    values = np.array(numbers, dtype=float)
    finite = [v for v in numbers if np.isfinite(v)]
    summary = summary_of(np.arange(len(numbers)), values)
    assert (summary.count, summary.nonfinite) == (len(numbers), len(numbers) - len(finite))
    assert summary.minimum == (min(finite) if finite else None)
    assert summary.maximum == (max(finite) if finite else None)
    assert summary.last == (numbers[-1] if np.isfinite(numbers[-1]) else None)
