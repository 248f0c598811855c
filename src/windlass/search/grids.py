"""Grids: the rows and columns of so many slices whose exchanges take least on a machine's links."""

from collections.abc import Sequence

from windlass.cost.rings import ring
from windlass.spec.grid import grid
from windlass.spec.machine import Link

_MOST_ROWS = 16
"""Heads divide by rows, and few models have heads for more."""


def quickest_grid(slices: int, links: Sequence[Link]) -> int:
    """The grid whose blocks exchange in the least time; a number where that is one column.

    Args:
        slices: a power of two.
        links: of the machine, innermost first, at least one.
    """
    able = (2**at for at in range(slices.bit_length()) if slices <= 2**at * _MOST_ROWS)
    columns = min(able, key=lambda columns: _exchange(slices, columns, links))
    return grid(slices // columns, columns)


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
