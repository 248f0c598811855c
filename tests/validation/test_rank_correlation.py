"""Pairs ordered: counted in blocks as they are counted one by one."""

import numpy as np
from hypothesis import given, strategies as st

from windlass.validation.metrics import count_ordered_pairs

TIMES = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9)), min_size=1, max_size=70)
"""Measured and predicted; whole, so that some are equal."""


@given(TIMES, st.sampled_from([0.01, 0.3, 1.0]))
def test_pairs_are_counted_as_one_by_one(times: list[tuple[int, int]], apart: float):
    measured, predicted = (np.array(each, dtype=float) for each in zip(*times, strict=True))
    ordered, far = 0.0, 0
    for at, (mine, told) in enumerate(times):
        for others, guess in times[:at]:
            if abs(np.log(mine) - np.log(others)) > apart:
                far += 1
                right = (mine > others) == (told > guess)
                ordered += 0.5 if told == guess else float(right)

    assert count_ordered_pairs(measured, predicted, apart) == (ordered, far)


def test_a_hundred_thousand_runs_of_one_group_are_ordered():
    measured = np.random.default_rng(7).permutation(100_000) + 1.0

    counted = count_ordered_pairs(measured, -measured, gap=1e-9)

    assert counted == (0.0, 100_000 * 99_999 // 2)
