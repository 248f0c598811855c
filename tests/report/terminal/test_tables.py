"""A bar of block characters is as long as its share, and gives way on a narrow terminal."""

import math

import pytest
from hypothesis import given, strategies as st
from rich.table import Table

from report.rendering import render
from windlass.report.terminal.tables import bar


@given(share=st.floats(0, 1))
def test_a_bar_is_as_long_as_its_share(share: float):
    assert math.isclose(len(render(bar(share)).strip()), share * 20, abs_tol=1.0)


@pytest.mark.parametrize("share", [-1.0, 2.0])
def test_a_bar_stays_in_its_cells(share: float):
    assert len(render(bar(share)).strip()) in (0, 20)


@pytest.mark.parametrize(("width", "cells"), [(40, 20), (22, 12)])
def test_numbers_beside_a_bar_stay_whole_on_a_narrow_terminal(width: int, cells: int):
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_row("24.5 GiB", bar(1.0))
    assert render(table, width).strip() == f"24.5 GiB  {'█' * cells}"
