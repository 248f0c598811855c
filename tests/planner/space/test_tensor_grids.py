"""The grid of tensor-parallel ranks that is tried."""

import pytest

from windlass.planner.space.options import tensor_grids
from windlass.schema.machine import Link
from windlass.schema.tensor_grid import TensorGrid


def link(joins: int, rate: float, shared_by: int) -> Link:
    return Link(name=f"of {joins}", joins=joins, latency=1e-6, rate=rate, shared_by=shared_by)


@pytest.mark.parametrize(
    ("slices", "least"),
    [(4, TensorGrid(2, 2)), (8, TensorGrid(4, 2)), (16, TensorGrid(8, 2)), (64, TensorGrid(16, 4))],
)
def test_on_equal_links_the_grid_sends_the_fewest_bytes(slices: int, least: TensorGrid):
    """As they were counted: the table of decision 17."""
    assert tensor_grids(slices, (link(64, 1e9, 1),))[0] == least


def test_columns_are_shorter_if_rings_share_the_ports_of_a_unit():
    """A column's slices lie apart, so that all rings of a unit leave by the same port."""
    assert tensor_grids(64, (link(4, 1.6e11, 1), link(64, 6.4e10, 4)))[0] == TensorGrid(8, 8)
