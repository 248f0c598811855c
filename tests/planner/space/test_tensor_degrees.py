"""The tensor-parallel degrees and grids that are tried."""

import pytest

from factories import sharded_graph, tiny_graph, tiny_machine
from windlass.planner.choose import choose_plan
from windlass.planner.space.tensor_degrees import (
    every_tensor_degree,
    open_tensor_degrees,
    tensor_grids,
)
from windlass.schema.machine import Link
from windlass.schema.request import ResolvedRequest
from windlass.schema.tensor_grid import TensorGrid

FOUR = tiny_machine(devices=4)


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


def request(*overrides: str) -> ResolvedRequest:
    sizes = ("train.batch=8", "train.sequence=32", "train.steps=10")
    return ResolvedRequest.resolve(overrides=(*sizes, *overrides))


def test_every_grid_whose_rows_divide_the_sequence_can_be_tried():
    grids = {TensorGrid(1, 2), TensorGrid(1, 3), TensorGrid(2, 2), TensorGrid(1, 4)}
    assert set(every_tensor_degree(request(), FOUR)) == {2, 4, *grids}
    assert set(every_tensor_degree(request("parallel.data=2"), FOUR)) == {2, TensorGrid(1, 2)}


def test_grids_are_added_that_no_other_grid_of_as_many_devices_divides_further():
    quickest = open_tensor_degrees(request(), FOUR)
    assert set(quickest) == {2, 4, TensorGrid(2, 2)}
    added = open_tensor_degrees(request(), FOUR, every=True)
    assert set(added) == {*quickest, TensorGrid(1, 4), TensorGrid(1, 3)}
    only_two_columns = set(every_tensor_degree(request(), FOUR)) - {TensorGrid(1, 2)}
    assert TensorGrid(1, 2) in open_tensor_degrees(request(), FOUR, only_two_columns, every=True)


def test_what_fits_only_in_a_slow_grid_is_not_said_not_to_fit():
    graph = sharded_graph(tiny_graph(layers=2, width=256, tied=False), (TensorGrid(1, 4),))
    unshardable = dict.fromkeys(every_tensor_degree(request(), FOUR), ("it has odd heads",))
    del unshardable[TensorGrid(1, 4)]
    graph = graph.model_copy(update={"unshardable": unshardable})
    pins = ("parallel.pipeline=1", "parallel.data=1", "batch.micro=8", "recompute=none")
    pinned = choose_plan(request(*pins, "parallel.tensor=1x4"), graph, FOUR)
    assert pinned.prediction is not None
    asked = request(*pins, f"memory={pinned.prediction.peaks[0].peak_bytes}")
    assert not choose_plan(asked, graph, FOUR).fits
    found = choose_plan(asked, graph, FOUR, every_grid=True)
    assert found.plan == pinned.plan


def test_grids_of_a_whole_pod_are_tried_where_nothing_fits():
    """`megatron-530b` fits a POD256 in this one only."""
    found = open_tensor_degrees(request(), tiny_machine(devices=256), every=True)
    assert TensorGrid(16, 16) in found
