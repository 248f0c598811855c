"""A bar of block characters is as long as its share."""

import math

import pytest
from hypothesis import given, strategies as st

from windlass.report.terminal.tables import bar


@given(share=st.floats(0, 1))
def test_a_bar_is_as_long_as_its_share(share: float):
    assert math.isclose(len(bar(share, 20)), share * 20, abs_tol=1.0)


@pytest.mark.parametrize("share", [-1.0, 2.0])
def test_a_bar_stays_in_its_cells(share: float):
    assert len(bar(share, 20)) in (0, 20)
