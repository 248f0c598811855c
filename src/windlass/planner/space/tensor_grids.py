"""Grids: the rows and columns of so many slices whose exchanges take least on a machine's links."""

from collections.abc import Sequence

from windlass.cost.ring_bandwidth import ring
from windlass.schema.machine import Link
from windlass.schema.tensor_grid import TensorGrid

_MOST_ROWS = 16
"""Heads divide by rows, and few models have heads for more."""


def grids(slices: int, links: Sequence[Link]) -> tuple[TensorGrid, ...]:
    """Grids of several rows and columns, those first whose blocks exchange in the least time.

    Args:
        slices: a power of two.
        links: of the machine, innermost first, at least one.
    """
    able = (2**at for at in range(1, slices.bit_length() - 1) if slices <= 2**at * _MOST_ROWS)
    quickest = sorted(able, key=lambda columns: _exchange(slices, columns, links))
    return tuple(TensorGrid(slices // columns, columns) for columns in quickest)


def _exchange(slices: int, columns: int, links: Sequence[Link]) -> float:
    """Seconds that a block's forward pass exchanges for each byte of its whole input.

    Of r x c slices, a block whose feed-forward is four times as wide as it sends `4/c (r-1)/r` over
    its column, whose slices lie c devices apart, and `12/r (c-1)/c` over its row, of neighbours
    (`docs/decisions/0017-grids.md`). What each exchange takes apart from its bytes is left out.
    """
    rows, seconds = slices // columns, 0.0
    if rows > 1:
        way = ring(links, rows, apart=columns, exchanging=slices)
        seconds += 4 / columns * (rows - 1) / rows * way.byte_seconds
    if columns > 1:
        way = ring(links, columns, apart=1, exchanging=slices)
        seconds += 12 / rows * (columns - 1) / columns * way.byte_seconds
    return seconds
