"""Tensor-parallel degrees: a number, or a grid of rows and columns such as `8x8`.

In one dimension each of t ranks holds its own tokens between layers (sequence parallelism). In a
grid of r x c, rank k is in row `k // c` and column `k mod c`: the ranks of a row hold the same
tokens, the ranks of a column the same features. A plain number t is the grid t x 1 and stays a
number wherever it is written.
"""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import PlainSerializer, PlainValidator

TensorAxis = Literal["all", "tokens", "features"]
"""Which tensor-parallel ranks of a layer communicate: all of them; those of one column, which
divide the tokens; or those of one row, which divide the features."""

_PATTERN = re.compile(r"([1-9][0-9]*)(?:x([1-9][0-9]*))?")


class TensorGrid(int):
    """A tensor-parallel degree with more than one column.

    It acts as the product `rows * columns` wherever only the number of ranks matters, but equals no
    plain number: sharding in two dimensions differs from sharding in one.
    """

    rows: int
    """Parts that the tokens are divided into."""
    columns: int
    """Parts that the features are divided into, 2 or more."""

    def __new__(cls, rows: int, columns: int) -> Self:
        """The degree `rows * columns`."""
        grid = super().__new__(cls, rows * columns)
        grid.rows, grid.columns = rows, columns
        return grid

    def __getnewargs__(self) -> tuple[int, int]:  # type: ignore[override]  # as our own `__new__`
        return self.rows, self.columns

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorGrid) and (self.rows, self.columns) == (
            other.rows,
            other.columns,
        )

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((self.rows, self.columns))

    def __repr__(self) -> str:
        return f"{self.rows}x{self.columns}"

    __str__ = __repr__


def tensor_degree(rows: int, columns: int) -> int:
    """The tensor-parallel degree of a grid: a plain number if it has one column."""
    return rows if columns == 1 else TensorGrid(rows, columns)


def grid_rows(degree: int) -> int:
    """Parts that the tokens are divided into."""
    return degree.rows if isinstance(degree, TensorGrid) else degree


def grid_columns(degree: int) -> int:
    """Parts that the features are divided into; 1 for a plain number."""
    return degree.columns if isinstance(degree, TensorGrid) else 1


def group_size(degree: int, axis: TensorAxis) -> int:
    """Number of ranks in one communication group of an axis."""
    sizes = {"all": int(degree), "tokens": grid_rows(degree), "features": grid_columns(degree)}
    return sizes[axis]


def group_span(degree: int, axis: TensorAxis) -> int:
    """Devices between the first and last rank of a group, both included; rows are contiguous."""
    return grid_columns(degree) if axis == "features" else int(degree)


def parse_tensor_degree(value: Any) -> int:  # noqa: ANN401  a boundary: whatever a file holds
    """Parses a tensor-parallel degree from a file or override: `4`, or `"2x2"`.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(value, TensorGrid):
        return value
    text = value if isinstance(value, str) else str(value)
    match = None if isinstance(value, bool) else _PATTERN.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            "should be a number of tensor-parallel ranks from 1, or rows and columns as in `2x2`"
        )
    return tensor_degree(int(match[1]), int(match[2] or 1))


def _serialize(degree: int) -> int | str:
    return str(degree) if isinstance(degree, TensorGrid) else degree


TensorDegree = Annotated[
    int, PlainValidator(parse_tensor_degree), PlainSerializer(_serialize, return_type=int | str)
]
"""A tensor-parallel degree: a number of ranks, or a grid of them."""
