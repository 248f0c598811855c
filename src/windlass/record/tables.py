"""The tables of the catalogue, the same in SQLite and PostgreSQL, and a run as their rows."""

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from windlass.record.run_row import COLUMNS, RunRow, Setting, Unit

if TYPE_CHECKING:
    from windlass.record.pyramid import Curve, SeriesSummary
    from windlass.record.run_entry import RunEntry

Value = str | int | float | bytes | None
Rows = Mapping[str, Sequence[tuple[Value, ...]]]
"""Rows by the names of their tables."""


class Table(NamedTuple):
    """One table; its first columns are its primary key."""

    name: str
    columns: Mapping[str, str]
    """`text`, `integer`, `real` or `blob` by name."""
    key: int = 2
    """Number of columns of the primary key."""


_TYPES = {
    "text": "text", "json": "text", "count": "integer", "flag": "integer", "bytes": "integer",
    "number": "real", "seconds": "real", "time": "real",
}  # fmt: skip
_MAX_INTEGER = 2.0**63
_LIST = {"run": "text", "position": "integer", "text": "text"}

RUN_TABLES = (
    Table("run", {"run": "text"} | {c.name: _TYPES[c.unit] for c in COLUMNS}, key=1),
    Table("setting", {"run": "text", "key": "text", "text": "text", "number": "real"}),
    Table(
        "series",
        {
            "run": "text", "name": "text", "count": "integer", "nonfinite": "integer",
            "first_step": "integer", "last_step": "integer",
            "last": "real", "minimum": "real", "median": "real", "maximum": "real",
        },
    ),
    Table("tag", _LIST),
    Table("note", _LIST),
    Table("fault", _LIST),
)  # fmt: skip
"""What is known of runs. The column `run` is the same in all rows of one run."""

CURVE_TABLES = (
    Table("axis", {"run": "text", "axis": "integer", "steps": "blob"}),
    Table(
        "curve",
        {
            "run": "text", "name": "text", "axis": "integer",
            "low": "blob", "median": "blob", "high": "blob",
        },
    ),
)  # fmt: skip
"""Pyramids: an axis holds steps as little-endian i64, a curve three times f32 beside an axis."""

TABLES_VERSION = zlib.crc32(repr((1, RUN_TABLES, CURVE_TABLES)).encode()) >> 1
"""A catalogue of another version is built anew: its tables differ, or (the first number) what is
read from runs does."""
ROW_COLUMNS = ", ".join(f'run."{column.name}"' for column in COLUMNS)
SUMMARY_COLUMNS = "count, nonfinite, first_step, last_step, last, minimum, median, maximum"


def create_statement(table: Table, types: Mapping[str, str], more: str = "") -> str:
    """The statement that makes a table.

    Args:
        types: the database's types by ours.
    """
    names = [f'"{name}" {types[kind]}' for name, kind in table.columns.items()]
    key = ", ".join(f'"{name}"' for name in list(table.columns)[: table.key])
    return f"CREATE TABLE {table.name} ({', '.join(names)}, PRIMARY KEY ({key})){more}"


def insert_statement(table: Table, mark: str = "?") -> str:
    """The statement that adds a row to a table; `mark` stands for each value."""
    names = ", ".join(f'"{name}"' for name in table.columns)
    marks = ", ".join([mark] * len(table.columns))
    return f"INSERT INTO {table.name} ({names}) VALUES ({marks})"  # noqa: S608  names of ours


def rows_of(run: str, entry: "RunEntry") -> Rows:
    """The rows of one run."""
    axes: dict[bytes, int] = {}
    numbers = [
        axes.setdefault(one.curve.steps.astype("<i8").tobytes(), len(axes)) for one in entry.series
    ]
    columns = entry.columns
    return {
        "run": [(run, *(_encoded(columns.get(name), unit) for name, unit in COLUMNS))],
        "setting": [(run, key, *_setting_columns(v)) for key, v in entry.settings.items()],
        "series": [(run, one.name, *astuple(one.summary)) for one in entry.series],
        "tag": list(_listed(run, columns["tags"])),
        "note": list(_listed(run, columns["notes"])),
        "fault": list(_listed(run, columns["faults"])),
        "axis": [(run, number, steps) for steps, number in axes.items()],
        "curve": [
            (run, one.name, number, *_curve_blobs(one.curve))
            for one, number in zip(entry.series, numbers, strict=True)
        ],
    }


def run_row(values: Sequence[Value], root: Path) -> RunRow:
    """A row of the table `run`."""
    row: dict[str, Any] = {
        name: decoded_value(value, unit)
        for (name, unit), value in zip(COLUMNS, values, strict=True)
    }
    return RunRow(**row | {"folder": root / row["folder"]})


def decoded_value(value: Value, unit: Unit) -> object:
    """A value of a column of the table `run` as the field of `RunRow` has it."""
    if unit == "flag":
        return bool(value)
    if unit != "json":
        return value
    if value == "[]":
        return ()
    decoded = json.loads(str(value))
    return tuple(decoded) if isinstance(decoded, list) else decoded


def decoded_setting(text: str, number: float | None) -> Setting:
    """A setting from its two columns; a text has no number."""
    return text if number is None else json.loads(text)


def series_summary(values: Sequence[Any]) -> "SeriesSummary":
    """The numbers of a series from the values of `SUMMARY_COLUMNS`."""
    from windlass.record.pyramid import SeriesSummary

    names = (field.name for field in fields(SeriesSummary))
    return SeriesSummary(**dict(zip(names, values, strict=True)))


def decoded_curve(steps: bytes, low: bytes, median: bytes, high: bytes) -> "Curve":
    """The pyramid of a series from its blobs."""
    import numpy as np

    from windlass.record.pyramid import Curve

    values = [np.frombuffer(blob, "<f4").astype(np.float32) for blob in (low, median, high)]
    return Curve(
        steps=np.frombuffer(steps, "<i8").astype(np.int64),
        low=values[0],
        median=values[1],
        high=values[2],
    )


def _encoded(value: object, unit: Unit) -> Value:
    """The value of a column for the database."""
    if unit == "json":
        return json.dumps(value, ensure_ascii=False)
    if value is None or isinstance(value, str):
        return value
    number = float(value)  # type: ignore[arg-type]  # all other columns are numbers
    if unit in ("number", "seconds", "time"):
        return number
    return int(number) if abs(number) < _MAX_INTEGER else None


def _setting_columns(value: Setting) -> tuple[str, float | None]:
    """The text of a setting, and its number if it is one."""
    if isinstance(value, str):
        return value, None
    try:
        number = float(value)
    except OverflowError:  # an integer beyond all floats
        return str(value), None
    return json.dumps(value), number


def _curve_blobs(curve: "Curve") -> tuple[bytes, bytes, bytes]:
    low, median, high = (
        values.astype("<f4").tobytes() for values in (curve.low, curve.median, curve.high)
    )
    return low, median, high


def _listed(run: str, texts: object) -> Iterator[tuple[Value, ...]]:
    if isinstance(texts, tuple):
        yield from ((run, position, text) for position, text in enumerate(texts))
