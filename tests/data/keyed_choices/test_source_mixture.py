import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from windlass.data.keyed_choices import source_mixture
from windlass.errors import DataError

WEIGHTS = st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=7)


@given(weights=WEIGHTS, seed=st.integers(0, 2**63), block=st.integers(0, 10**9))
@settings(max_examples=25)
def test_every_thousand_samples_have_each_source_in_its_exact_share(
    weights: list[float], seed: int, block: int
):
    mixture = source_mixture(weights, seed)
    sources, _ = mixture.locate(np.arange(1000 * block, 1000 * (block + 1)))
    counts = np.bincount(sources, minlength=len(weights))
    assert tuple(counts) == mixture.shares
    exact = 1000 * np.array(weights) / sum(weights)
    # Shares are rounded to a thousandth, and a tiny one takes a whole thousandth from the largest.
    assert (np.abs(counts - np.maximum(1, exact)) <= len(weights)).all()


@given(weights=WEIGHTS, seed=st.integers(0, 2**63))
@settings(max_examples=25)
def test_the_samples_of_a_source_are_each_taken_once(weights: list[float], seed: int):
    sources, indices = source_mixture(weights, seed).locate(np.arange(3000))
    for source in range(len(weights)):
        taken = np.sort(indices[sources == source])
        assert (taken == np.arange(len(taken))).all()


def test_equal_weights_are_shared_equally_and_one_source_is_taken_in_order():
    assert source_mixture([2.0, 2.0], 0).shares == (500, 500)
    sources, indices = source_mixture([0.1], 7).locate(np.arange(10))
    assert (sources == 0).all()
    assert (indices == np.arange(10)).all()


def test_more_sources_than_samples_in_a_block_are_refused():
    with pytest.raises(DataError, match="1001 sources; at most 1000 can be mixed"):
        source_mixture([1.0] * 1001, 0)
