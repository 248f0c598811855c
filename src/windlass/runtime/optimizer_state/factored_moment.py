"""The second moment of a matrix as means over its rows and columns, whoever holds parts of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

Ranges = Sequence[tuple[tuple[int, int], ...] | None]
"""Index ranges of each dimension of a part; None for a full dimension."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FactoredMoment:
    """Means of squared gradients over the rows and the columns of a whole weight.

    Every rank that holds a part of the weight keeps those of all of it. A weight with more than two
    dimensions is many matrices, whose rows and columns are its last two, as in `torch.optim`.
    """

    rows: Tensor
    """`Float[matrices rows]`: mean over the columns."""
    columns: Tensor
    """`Float[matrices columns]`: mean over the rows."""
    ranges: Ranges
    """What a tensor-parallel rank has of each dimension of the weight."""
    shape: tuple[int, ...]
    """Shape of the whole weight."""

    @classmethod
    def zeros(
        cls, shape: tuple[int, ...], like: Tensor, ranges: Ranges | None = None
    ) -> "FactoredMoment":
        """Before the first update.

        Args:
            ranges: what a tensor-parallel rank has of it; None for all.
        """
        *leading, rows, columns = shape
        matrices = torch.Size(leading).numel()
        dtype = torch.promote_types(like.dtype, torch.float32)
        return cls(
            rows=torch.zeros(matrices, rows, dtype=dtype, device=like.device),
            columns=torch.zeros(matrices, columns, dtype=dtype, device=like.device),
            ranges=ranges or (None,) * len(shape),
            shape=shape,
        )

    def on(self, device: torch.device) -> "FactoredMoment":
        """The same on a device."""
        rows, columns = self.rows.to(device), self.columns.to(device)
        return replace(self, rows=rows, columns=columns)

    @property
    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Kind of checkpoint entry, and tensor."""
        yield "rows", self.rows
        yield "columns", self.columns

    def place(self) -> "MatrixPlace":
        """Where a tensor-parallel rank's part of the weight lies in it."""
        device, positions = self.rows.device, []
        for size, ranges in zip(self.shape, self.ranges, strict=True):
            parts = [torch.arange(a, b, device=device) for a, b in ranges or ((0, size),)]
            positions.append(torch.cat(parts))
        rows = positions[0].new_zeros(1)
        for size, own in zip(self.shape[:-1], positions[:-1], strict=True):
            rows = (rows[:, None] * size + own).view(-1)
        return MatrixPlace(rows, rows // self.shape[-2], positions[-1])


class MatrixPlace(NamedTuple):
    """Where the rows and columns of a part of a weight lie in the whole weight."""

    rows: Tensor
    """`Int64[own rows]`: row of all matrices, one behind the other."""
    matrices: Tensor
    """`Int64[own rows]`: the matrix of each row."""
    columns: Tensor
    """`Int64[own columns]`: column of its matrix."""


class Block(NamedTuple):
    """Elements of a row-major matrix that follow each other and form a rectangle."""

    elements: slice
    rows: slice
    columns: slice
    shape: tuple[int, int]


def blocks(first: int, count: int, width: int) -> Iterator[Block]:
    """At most three rectangles that hold `count` elements from `first` on."""
    begin = 0
    while begin < count:
        row, column = divmod(first + begin, width)
        is_part = column > 0 or count - begin < width
        rows = 1 if is_part else (count - begin) // width
        columns = min(width - column, count - begin)
        end = begin + rows * columns
        yield Block(
            slice(begin, end), slice(row, row + rows), slice(column, column + columns),
            (rows, columns),
        )  # fmt: skip
        begin = end
