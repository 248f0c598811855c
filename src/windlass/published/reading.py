"""Reading: numbers and words out of a row's cells, or what it leaves unsaid."""

import re

from windlass.published.table import Row

_LEADING = re.compile(r"\s*~?\s*([0-9]+(?:\.[0-9]+)?)\s*([kK]?)")

_MOST = 1e18
"""More than any count, time or throughput of a run."""


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
        raise Unsaid(f"`{column}` = {row.text(column)!r} is no number") from None
    if value is not None and not 0 <= value <= _MOST:
        raise Unsaid(f"`{column}` = {row.text(column)!r} is no number from 0 to {_MOST:g}")
    return value


def count(row: Row, column: str) -> float | None:
    """The cell's whole number of 1 or more; None where it is empty.

    Raises:
        Unsaid: it is no such number.
    """
    value = number(row, column)
    if value is not None and (value < 1 or value % 1):
        raise Unsaid(f"`{column}` = {row.text(column)!r} is no whole number of 1 or more")
    return value


def needed(row: Row, *columns: str) -> list[float]:
    """The numbers of cells that must not be empty or 0.

    Raises:
        Unsaid: which of them are not published.
    """
    found = [number(row, column) for column in columns]
    missing = [f"`{name}`" for name, value in zip(columns, found, strict=True) if not value]
    if missing:
        raise Unsaid(f"{', '.join(missing)} not published")
    return [value for value in found if value]


def leading(text: str) -> float | None:
    """The number that a text begins with: `~250k (BLOOM)` is 250,000; None where there is none."""
    found = _LEADING.match(text)
    return float(found[1]) * (1000.0 if found[2] else 1.0) if found else None
