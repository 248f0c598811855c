"""Laws of tensor-parallel grids: how they are written, and when they are equal."""

import copy

import pytest
from hypothesis import given, strategies as st

from windlass.errors import InputErrors
from windlass.schema.plan import Parallelism
from windlass.schema.request import Request
from windlass.schema.tensor_grid import (
    TensorAxis,
    TensorGrid,
    grid_columns,
    grid_rows,
    group_size,
    group_span,
    parse_tensor_degree,
    tensor_degree,
)

DEGREES = st.integers(1, 64)


@given(rows=DEGREES, columns=DEGREES)
def test_a_grid_parses_as_it_prints_and_one_column_is_a_number(rows: int, columns: int):
    degree = tensor_degree(rows, columns)
    assert parse_tensor_degree(str(degree)) == degree == parse_tensor_degree(f"{rows}x{columns}")
    assert (grid_rows(degree), grid_columns(degree)) == (rows, columns)
    assert isinstance(degree, TensorGrid) == (columns > 1)
    assert int(degree) == rows * columns


@given(rows=DEGREES, columns=st.integers(2, 64))
def test_a_grid_acts_as_its_product_and_equals_no_number(rows: int, columns: int):
    degree = TensorGrid(rows, columns)
    assert degree != int(degree)
    assert int(degree) != degree
    assert degree > 1
    assert 2 * degree == 2 * rows * columns
    assert {degree: "grid", int(degree): "number"}[TensorGrid(rows, columns)] == "grid"
    assert copy.deepcopy(degree) == degree


@given(rows=DEGREES, columns=DEGREES)
def test_the_groups_of_a_grid_are_its_rows_and_columns(rows: int, columns: int):
    degree = tensor_degree(rows, columns)
    rings: tuple[TensorAxis, ...] = ("all", "tokens", "features")
    assert [group_size(degree, each) for each in rings] == [rows * columns, rows, columns]
    assert [group_span(degree, each) for each in rings] == [rows * columns, rows * columns, columns]


def test_a_plan_keeps_its_grid_and_a_number_stays_a_number():
    cut = Parallelism.model_validate({"pipeline": 2, "tensor": "8x8"})
    assert cut.devices == 128
    assert 'tensor = "8x8"' in cut.to_toml()
    assert Parallelism.model_validate_json(cut.to_json()) == cut
    assert Parallelism.model_validate({"tensor": "4x1"}) == Parallelism(tensor=4)
    assert "tensor = 4" in Parallelism(tensor=4).to_toml()
    assert cut.fingerprint() != Parallelism(pipeline=2, tensor=64).fingerprint()
    assert Request.resolve(None, ["parallel.tensor=2x2"]).parallel.tensor == TensorGrid(2, 2)


@pytest.mark.parametrize("text", ["0", "2x", "x2", "2x0", "true", "2.5", "2x2x2", "-4", "many"])
def test_an_invalid_tensor_degree_is_refused(text: str):
    with pytest.raises(
        InputErrors, match=r"`parallel\.tensor` = .*: should be a number of tensor-parallel"
    ):
        Request.resolve(None, [f"parallel.tensor={text}"])
