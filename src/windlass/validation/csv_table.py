"""Table: a CSV file of measured runs, read whole; what is wrong in it is told all at once."""

import csv
import hashlib
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from windlass.errors import InputErrors, RequestError, did_you_mean

COLUMNS = (
    "source", "model", "params", "layers", "hidden", "heads", "seq", "vocab", "global_batch",
    "microbatch", "t", "p", "d", "interleave", "recompute", "sequence_parallel", "zero", "device",
    "n_devices", "measured_step_s", "measured_tflops_per_device", "measured_throughput", "notes",
)  # fmt: skip
"""That every table has; an empty cell was not published."""
EXTRA = (
    "throughput_unit", "peak_memory_gb", "peak_memory_gib", "outcome", "precision", "line",
    "mfu_pct", "hfu_pct", "grad_accum", "context_parallel", "ffn", "kv_heads", "round", "org",
    "system", "framework", "sdk", "n_runs", "train_minutes_median", "train_minutes_all", "kind",
    "device_hours", "tokens",
)  # fmt: skip
"""That a table may have."""
_NEEDED = ("model", "device", "measured_step_s")
_TOLD = 20
"""Lines of another length that are told one by one."""
_OTHER_MARKS = {";": "semicolons", "\t": "tabs"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """One line of a table: its cells by column."""

    line: int
    cells: Mapping[str, str]

    def text(self, column: str) -> str:
        """The cell without blanks around it; empty where there is none."""
        return self.cells.get(column, "").strip()

    def number(self, column: str) -> float | None:
        """The cell's number; None where it is empty or there is no such column."""
        text = self.text(column)
        if not text or text.upper() in {"N/A", "NA", "NONE"}:
            return None
        return float(text)

    @property
    def key(self) -> str:
        """Ten hexadecimal digits that tell this row from others, whichever file it stands in."""
        content = "\x1f".join(f"{name}={self.text(name)}" for name in COLUMNS)
        return hashlib.sha256(content.encode()).hexdigest()[:10]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTable:
    """All rows of one file."""

    name: str
    rows: tuple[TableRow, ...]
    unknown_columns: tuple[str, ...]
    """Columns that nothing here reads."""


def read_table(path: Path) -> RunTable:
    """The rows of a CSV file.

    Raises:
        RequestError: no such file, or no text, or no table of runs, or one without rows.
        Faults: every line of another length than the head, the first ones each.
    """
    header, lines = _lines(path)
    if not lines:
        raise RequestError(f"`{path}` has a head and no rows below it")
    faults: list[str] = []
    rows: list[TableRow] = []
    for line, cells in lines:
        if len(cells) != len(header):
            faults.append(f"{path}:{line}: {len(cells)} cells, the head has {len(header)}")
            continue
        row = TableRow(line=line, cells=dict(zip(header, cells, strict=True)))
        rows.append(row)
    if faults:
        more = len(faults) - _TOLD
        told = [f"{path}: {more} more such lines"] if more > 0 else []
        raise InputErrors([*faults[:_TOLD], *told])
    known = {*COLUMNS, *EXTRA}
    return RunTable(
        name=path.name, rows=tuple(rows), unknown_columns=tuple(n for n in header if n not in known)
    )


def _check_head(path: Path, header: list[str]) -> None:
    twice = sorted({name for name in header if name and header.count(name) > 1})
    if twice:
        told = ", ".join(f"`{name}`" for name in twice)
        raise RequestError(f"`{path}`: {told} stands twice in the head; take one of each out")
    missing = [name for name in _NEEDED if name not in header]
    if not missing:
        return
    told = ", ".join(f"`{name}`" for name in missing)
    near = "".join(did_you_mean(name, header) for name in missing[:1])
    other = next((mark for mark in _OTHER_MARKS if mark in "".join(header)), None)
    if other is not None:
        near = f" (cells are parted by commas, not by {_OTHER_MARKS[other]})"
    raise RequestError(
        f"`{path}` is no table of runs: the columns {told} are not there{near}; "
        "`docs/accuracy.md` tells what a table of runs has"
    )


def _lines(path: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """The head, and each filled line with its number."""
    reader = csv.reader(io.StringIO(_text(path), newline=""), strict=True)
    try:
        header = [name.strip().lower() for name in next(reader, [])]
        _check_head(path, header)
        # Spreadsheets write rows of empty cells below a table.
        filled = ((reader.line_num, cells) for cells in reader if any(map(str.strip, cells)))
        return header, list(filled)
    except csv.Error as error:
        raise RequestError(f"{path}:{reader.line_num}: no line of a table: {error}") from None


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise RequestError(f"no file `{path}`") from None
    except IsADirectoryError:
        raise RequestError(f"`{path}` is a folder; name the tables in it") from None
    except OSError as error:
        raise RequestError(f"`{path}` cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise RequestError(
            f"{path}:{line}: no text in UTF-8; save the table anew as CSV in UTF-8"
        ) from None


_LEADING = re.compile(r"\s*~?\s*([0-9]+(?:\.[0-9]+)?)\s*([kK]?)")

_MOST = 1e18
"""More than any count, time or throughput of a run."""
_SHOWN = 40
"""Characters of a cell that an error shows."""


class UnusableRow(Exception):  # noqa: N818  why a row cannot be expressed; no fault of ours or the user's
    """What a row does not say, or says unreadably; never leaves `express`."""


def read_number(row: TableRow, column: str) -> float | None:
    """The cell's number, 0 to 1e18; None where it is empty.

    Raises:
        Unsaid: it is no such number.
    """
    try:
        value = row.number(column)
    except ValueError:
        raise UnusableRow(f"{_stated(row, column)} is no number") from None
    return _in_range(row, column, value)


def read_count(row: TableRow, column: str) -> float | None:
    """The cell's whole number of 1 or more; None where it is empty.

    Raises:
        Unsaid: it is no such number.
    """
    value = read_number(row, column)
    if value is not None and (value < 1 or value % 1):
        raise UnusableRow(f"{_stated(row, column)} is no whole number of 1 or more")
    return value


def required_numbers(row: TableRow, *columns: str) -> list[float]:
    """The numbers of cells that must not be empty or 0.

    Raises:
        Unsaid: which of them are not published.
    """
    found = [read_number(row, column) for column in columns]
    missing = [f"`{name}`" for name, value in zip(columns, found, strict=True) if value is None]
    if missing:
        raise UnusableRow(f"{', '.join(missing)} not published")
    none = [_stated(row, name) for name, value in zip(columns, found, strict=True) if value == 0]
    if none:
        raise UnusableRow(f"{', '.join(none)} is no number above 0")
    return [value for value in found if value]


def leading_number(row: TableRow, column: str) -> float | None:
    """The number that a cell begins with: `~250k (BLOOM)` is 250,000; None where there is none.

    Raises:
        Unsaid: it is more than 1e18.
    """
    found = _LEADING.match(row.text(column))
    value = float(found[1]) * (1000.0 if found[2] else 1.0) if found else None
    return _in_range(row, column, value)


def _in_range(row: TableRow, column: str, value: float | None) -> float | None:
    if value is not None and not 0 <= value <= _MOST:
        raise UnusableRow(f"{_stated(row, column)} is no number from 0 to {_MOST:g}")
    return value


def _stated(row: TableRow, column: str) -> str:
    """`layers` = 'ten', long cells cut short."""
    text = row.text(column)
    short = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    return f"`{column}` = {short!r}"
