"""Grid: the slices of a layer in rows and columns, written `8x8`; in one column they are a number.

In one dimension each of t slices has its own tokens. In a grid of r x c, slice k is in row `k // c`
and column `k mod c`: the slices of one row have the same tokens, those of one column the same
features. So a number of slices is t x 1, and stays a number wherever it is written.
"""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import PlainSerializer, PlainValidator

TensorAxis = Literal["all", "tokens", "features"]
"""Which slices of a layer exchange: all of them; those of one column, which share the tokens out;
or those of one row, which share the features out."""

_WRITTEN = re.compile(r"([1-9][0-9]*)(?:x([1-9][0-9]*))?")


class TensorGrid(int):
    """A number of slices that lie in more than one column.

    It counts as their product wherever only their number matters, but equals no plain number: a cut
    in two dimensions is another cut.

    Args:
        rows: shares of the tokens.
        columns: shares of the features, 2 or more.
    """

    rows: int
    columns: int

    def __new__(cls, rows: int, columns: int) -> Self:
        """The number of so many rows and columns."""
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


def tensor_grid(rows: int, columns: int) -> int:
    """So many rows and columns of slices: a number if they are one column."""
    return rows if columns == 1 else TensorGrid(rows, columns)


def grid_rows(degree: int) -> int:
    """Shares of the tokens."""
    return degree.rows if isinstance(degree, TensorGrid) else degree


def grid_columns(degree: int) -> int:
    """Shares of the features; 1 of a cut in one dimension."""
    return degree.columns if isinstance(degree, TensorGrid) else 1


def group_size(degree: int, axis: TensorAxis) -> int:
    """How many slices exchange with one another."""
    return {"all": int(degree), "tokens": grid_rows(degree), "features": grid_columns(degree)}[
        axis
    ]


def group_span(degree: int, axis: TensorAxis) -> int:
    """Devices from the first to the last slice of such a ring: those of one row are neighbours."""
    return grid_columns(degree) if axis == "features" else int(degree)


def parse_tensor_degree(value: Any) -> int:  # noqa: ANN401  a border: whatever a file holds
    """A number of slices as a file or override writes it: `4`, or `"2x2"`.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(value, TensorGrid):
        return value
    number = value if isinstance(value, str) else str(value)
    match = None if isinstance(value, bool) else _WRITTEN.fullmatch(number.strip())
    if match is None:
        raise ValueError(
            "should be a number of slices from 1, or their rows and columns as in `2x2`"
        )
    return tensor_grid(int(match[1]), int(match[2] or 1))


def _written(slices: int) -> int | str:
    return str(slices) if isinstance(slices, TensorGrid) else slices


TensorDegree = Annotated[
    int, PlainValidator(parse_tensor_degree), PlainSerializer(_written, return_type=int | str)
]
"""A number of slices, or a grid of them."""
