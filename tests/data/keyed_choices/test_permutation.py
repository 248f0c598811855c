import numpy as np
from hypothesis import given, strategies as st

from windlass.data.keyed_choices import keyed_number, keyed_permutation


@given(size=st.integers(1, 3000), key=st.integers(-(2**70), 2**70))
def test_a_permutation_gives_every_entry_exactly_once(size: int, key: int):
    sent = keyed_permutation(size, key, 3)(np.arange(size))
    assert sorted(sent.tolist()) == list(range(size))


@given(size=st.integers(1, 2**40), index=st.integers(0, 2**40), key=st.integers(0, 99))
def test_a_single_entry_is_permuted_as_among_others(size: int, index: int, key: int):
    index %= size
    order = keyed_permutation(size, key)
    among = order(np.array([0, index, size - 1]))
    assert order(np.array([index]))[0] == among[1] < size


def test_all_orders_of_a_small_range_occur_about_equally_often():
    draws = 3000
    orders = [tuple(keyed_permutation(3, key)(np.arange(3)).tolist()) for key in range(draws)]
    counts = np.unique(np.array(orders), axis=0, return_counts=True)[1]
    # Six orders, 500 each expected; five standard deviations are 102.
    assert len(counts) == 6
    assert np.abs(counts - draws / 6).max() < 102


def test_neighbours_do_not_stay_neighbours():
    sent = keyed_permutation(100_000, 1)(np.arange(100_000))
    # Two random numbers below n are n / 3 apart on average.
    assert abs(np.abs(np.diff(sent)).mean() / 100_000 - 1 / 3) < 0.01


def test_a_known_key_gives_the_known_order_on_every_machine():
    assert keyed_permutation(10, 7, 0)(np.arange(10)).tolist() == [7, 4, 1, 2, 3, 9, 5, 6, 0, 8]
    assert keyed_number(10**12, 7, 0) == 610_573_336_204
