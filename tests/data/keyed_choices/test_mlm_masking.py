"""What is hidden from a model that predicts it: how much, where, and that only the key decides."""

import numpy as np
from hypothesis import given, strategies as st

from windlass.data.keyed_choices import MlmMasking

MASKING = MlmMasking(mask_token=300, vocabulary=256, ignore_index=-100)
SEEDS = st.integers(0, 2**32)


@given(length=st.integers(1, 600), seed=SEEDS, step=st.integers(1, 9), sample=st.integers(0, 99))
def test_sequences_of_one_length_have_equally_many_targets(
    length: int, seed: int, step: int, sample: int
):
    row = np.arange(length, dtype=np.int64) % 256
    inputs, targets = MASKING.mask(row, seed, step, sample)
    aimed = targets != MASKING.ignore_index
    assert aimed.sum() == max(1, round(0.15 * length))
    assert (targets[aimed] == row[aimed]).all()
    assert (inputs[~aimed] == row[~aimed]).all()
    assert set(MASKING.masked_positions(length, seed, step, sample)) == set(np.flatnonzero(aimed))


def test_eight_in_ten_targets_are_masked_and_one_is_random():
    """Devlin et al. 2018, section 3.1; a replacement may by chance be what was there."""
    row = np.arange(2000, dtype=np.int64) % 256
    inputs, targets = MASKING.mask(row, 7)
    aimed = targets != MASKING.ignore_index
    assert aimed.sum() == 300
    assert (inputs[aimed] == MASKING.mask_token).sum() == 240
    others = inputs[aimed] != MASKING.mask_token
    changed = (inputs[aimed][others] != row[aimed][others]).sum()
    assert 27 <= changed <= 30
    assert inputs[inputs != MASKING.mask_token].max() < MASKING.vocabulary


@given(one=SEEDS, other=SEEDS)
def test_only_the_key_decides_what_is_masked(one: int, other: int):
    row = np.arange(200, dtype=np.int64)
    first, again, third = (MASKING.mask(row, key, 1, 0)[0] for key in (one, one, other))
    assert (first == again).all()
    assert (first != third).any() == (one != other)
    assert (row == np.arange(200)).all()
