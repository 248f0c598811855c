"""Reading: numbers and words out of a row's cells, or what it leaves unsaid."""

import re

from windlass.published.table import Row

_LEADING = re.compile(r"\s*~?\s*([0-9]+(?:\.[0-9]+)?)\s*([kK]?)")

_MOST = 1e18
"""More than any count, time or throughput of a run."""
_SHOWN = 40
"""Characters of a cell that an error shows."""


class Unsaid(Exception):  # noqa: N818  why a row cannot be expressed; no fault of ours or the user's
    """What a row does not say, or says unreadably; never leaves `express`."""


def number(row: Row, column: str) -> float | None:
    """The cell's number, 0 to 1e18; None where it is empty.

    Raises:
        Unsaid: it is no such number.
    """
    try:
        value = row.number(column)
    except ValueError:
        raise Unsaid(f"{_stated(row, column)} is no number") from None
    return _in_range(row, column, value)


def count(row: Row, column: str) -> float | None:
    """The cell's whole number of 1 or more; None where it is empty.

    Raises:
        Unsaid: it is no such number.
    """
    value = number(row, column)
    if value is not None and (value < 1 or value % 1):
        raise Unsaid(f"{_stated(row, column)} is no whole number of 1 or more")
    return value


def needed(row: Row, *columns: str) -> list[float]:
    """The numbers of cells that must not be empty or 0.

    Raises:
        Unsaid: which of them are not published.
    """
    found = [number(row, column) for column in columns]
    missing = [f"`{name}`" for name, value in zip(columns, found, strict=True) if value is None]
    if missing:
        raise Unsaid(f"{', '.join(missing)} not published")
    none = [_stated(row, name) for name, value in zip(columns, found, strict=True) if value == 0]
    if none:
        raise Unsaid(f"{', '.join(none)} is no number above 0")
    return [value for value in found if value]


def leading(row: Row, column: str) -> float | None:
    """The number that a cell begins with: `~250k (BLOOM)` is 250,000; None where there is none.

    Raises:
        Unsaid: it is more than 1e18.
    """
    found = _LEADING.match(row.text(column))
    value = float(found[1]) * (1000.0 if found[2] else 1.0) if found else None
    return _in_range(row, column, value)


def _in_range(row: Row, column: str, value: float | None) -> float | None:
    if value is not None and not 0 <= value <= _MOST:
        raise Unsaid(f"{_stated(row, column)} is no number from 0 to {_MOST:g}")
    return value


def _stated(row: Row, column: str) -> str:
    """`layers` = 'ten', long cells cut short."""
    text = row.text(column)
    short = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    return f"`{column}` = {short!r}"
