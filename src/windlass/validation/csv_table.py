"""Reads CSV files of published runs; all faults of a file are reported at once."""

import csv
import hashlib
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from windlass.atomic_files import read_regular_file
from windlass.errors import InputErrors, RequestError, did_you_mean

Meaning = TypeVar("Meaning")

COLUMNS = (
    "source", "model", "params", "layers", "hidden", "heads", "seq", "vocab", "global_batch",
    "microbatch", "t", "p", "d", "interleave", "recompute", "sequence_parallel", "zero", "device",
    "n_devices", "measured_step_s", "measured_tflops_per_device", "measured_throughput", "notes",
)  # fmt: skip
"""Columns of every table; an empty cell means that the value was not published."""
_ORIGIN = (
    "source", "line", "notes", "measured_tflops_per_device", "mfu_pct", "hfu_pct", "round", "org",
    "n_runs", "train_minutes_median", "train_minutes_all", "kind", "device_hours", "tokens",
    "measured_throughput", "throughput_unit",
)  # fmt: skip
"""Columns that say where a row comes from and what else was measured, not what ran."""
_REQUIRED = ("model", "device", "measured_step_s")
_MAX_REPORTED = 20
"""Lines of the wrong length that are reported one by one."""
_OTHER_SEPARATORS = {";": "semicolons", "\t": "tabs"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """One line of a table: its cells by column, and which of them were read."""

    line: int
    cells: Mapping[str, str]
    _read: set[str] = field(default_factory=set, compare=False, repr=False)

    def text(self, column: str) -> str:
        """The cell without surrounding blanks; empty if there is no such column."""
        self._read.add(column)
        return self.peek(column)

    def peek(self, column: str) -> str:
        """The same, by which the cell does not count as read."""
        return self.cells.get(column, "").strip()

    @property
    def unread(self) -> tuple[str, ...]:
        """Columns of what ran whose cells are filled and were not read."""
        read = {*self._read, *_ORIGIN}
        return tuple(name for name in self.cells if name not in read and self.peek(name))

    def number(self, column: str) -> float | None:
        """The cell's number; None if it is empty or there is no such column."""
        text = self.text(column)
        if not text or text.upper() in {"N/A", "NA", "NONE"}:
            return None
        return float(text)

    @property
    def key(self) -> str:
        """Ten hexadecimal digits that identify this row in any file."""
        content = "\x1f".join(f"{name}={self.peek(name)}" for name in COLUMNS)
        return hashlib.sha256(content.encode()).hexdigest()[:10]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTable:
    """All rows of one file."""

    name: str
    rows: tuple[TableRow, ...]


def read_table(path: Path) -> RunTable:
    """The rows of a CSV file.

    Raises:
        RequestError: the file is missing, is not UTF-8 text or not a table of runs, or has no rows.
        InputErrors: lines whose length differs from the header's; the first are named one by one.
    """
    header, lines = _lines(path)
    if not lines:
        raise RequestError(f"`{path}` has a header and no rows below it")
    faults: list[str] = []
    rows: list[TableRow] = []
    for line, cells in lines:
        if len(cells) != len(header):
            faults.append(f"{path}:{line}: {len(cells)} cells, but the header has {len(header)}")
            continue
        row = TableRow(line=line, cells=dict(zip(header, cells, strict=True)))
        rows.append(row)
    if faults:
        more = len(faults) - _MAX_REPORTED
        rest = [f"{path}: {more} more such lines"] if more > 0 else []
        raise InputErrors([*faults[:_MAX_REPORTED], *rest])
    return RunTable(name=path.name, rows=tuple(rows))


def _check_header(path: Path, header: list[str]) -> None:
    duplicates = sorted({name for name in header if name and header.count(name) > 1})
    if duplicates:
        names = ", ".join(f"`{name}`" for name in duplicates)
        raise RequestError(f"`{path}`: column {names} appears twice; remove one of each")
    missing = [name for name in _REQUIRED if name not in header]
    if not missing:
        return
    names = ", ".join(f"`{name}`" for name in missing)
    hint = "".join(did_you_mean(name, header) for name in missing[:1])
    other = next((mark for mark in _OTHER_SEPARATORS if mark in "".join(header)), None)
    if other is not None:
        hint = f" (separate cells by commas, not by {_OTHER_SEPARATORS[other]})"
    raise RequestError(
        f"`{path}` is not a table of runs: columns {names} are missing{hint}; "
        "`docs/accuracy.md` lists the columns of such a table"
    )


def _lines(path: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """The header, and each line that is not empty with its line number."""
    reader = csv.reader(io.StringIO(_text(path), newline=""), strict=True)
    try:
        header = [name.strip().lower() for name in next(reader, [])]
        _check_header(path, header)
        # Spreadsheets write rows of empty cells below a table.
        filled = ((reader.line_num, cells) for cells in reader if any(map(str.strip, cells)))
        return header, list(filled)
    except csv.Error as error:
        raise RequestError(
            f"{path}:{reader.line_num}: not a line of a CSV table: {error}"
        ) from None


def _text(path: Path) -> str:
    try:
        return read_regular_file(path).decode("utf-8-sig")
    except FileNotFoundError:
        raise RequestError(f"there is no file `{path}`") from None
    except IsADirectoryError:
        raise RequestError(f"`{path}` is a folder; name the tables in it") from None
    except OSError as error:
        raise RequestError(f"`{path}` cannot be read: {(error.strerror or '').lower()}") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise RequestError(
            f"{path}:{line}: the text is not UTF-8; save the table as CSV in UTF-8"
        ) from None


_LEADING_NUMBER = re.compile(r"\s*~?\s*([0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)\s*([kK]?)")

_FIRST_WORD = re.compile(r"[a-z]+|\d+")

_MAX_VALUE = 1e18
"""Larger than any count, time or throughput of a run."""
_NUMBERS = (
    "params", "layers", "hidden", "heads", "seq", "vocab", "global_batch", "microbatch", "t", "p",
    "d", "interleave", "zero", "n_devices", "measured_step_s", "measured_throughput",
    "peak_memory_gb", "peak_memory_gib", "grad_accum", "context_parallel", "ffn", "kv_heads",
    "expert_parallel", "experts", "experts_per_token", "expert_ffn", "shared_ffn", "dense_layers",
    "head_dim", "lora_rank",
)  # fmt: skip
"""Columns whose cells are numbers, or begin with one."""
_MOST = {"layers": 2_000, "p": 256, "interleave": 32}
"""Counts that a plan lists one by one, with more than any run has."""
_SHOWN_CHARACTERS = 40
"""Length to which an error shortens a cell."""


class UnusableRow(Exception):  # noqa: N818  a reason to skip a row, not an error of the user
    """Why a row cannot become a run; `rows_to_runs` catches it and keeps the reason."""


def check_numbers(row: TableRow) -> None:
    """Checks that no number of a row is negative, infinite or none, whether it is needed or not.

    Raises:
        UnusableRow: a number is not from 0 to 1e18.
    """
    for column in _NUMBERS:
        try:
            value = float(row.peek(column) or "0")
        except ValueError:  # words; who needs a number refuses them
            continue
        _in_range(row, column, value)


def read_number(row: TableRow, column: str) -> float | None:
    """The cell's number, 0 to 1e18; None if it is empty.

    Raises:
        UnusableRow: the cell holds anything else.
    """
    try:
        value = row.number(column)
    except ValueError:
        raise UnusableRow(f"{shown_cell(row, column)} is not a number") from None
    return _in_range(row, column, value)


def read_count(row: TableRow, column: str) -> float | None:
    """The cell's whole number of 1 or more; None if it is empty.

    Raises:
        UnusableRow: the cell holds anything else.
    """
    return _count(row, column, read_number(row, column))


def at_most(column: str, value: float) -> float:
    """The count of a column.

    Raises:
        UnusableRow: no run has so many.
    """
    if value > _MOST.get(column, _MAX_VALUE):
        raise UnusableRow(f"`{column}` of {value:g} is more than {_MOST[column]:,}, as no run has")
    return value


def required_numbers(row: TableRow, *columns: str) -> list[float]:
    """The numbers of cells that must be 1 or more.

    Raises:
        UnusableRow: at least one is not published or is less; the message names each.
    """
    values = [read_number(row, column) for column in columns]
    missing = [f"`{name}`" for name, value in zip(columns, values, strict=True) if value is None]
    if missing:
        raise UnusableRow(f"{', '.join(missing)} not published")
    few = [
        shown_cell(row, name)
        for name, value in zip(columns, values, strict=True)
        if value is not None and value < 1
    ]
    if few:
        raise UnusableRow(f"{', '.join(few)} is not a number of 1 or more")
    return [value for value in values if value]


def leading_count(row: TableRow, column: str) -> float | None:
    """The whole number of 1 or more at the start of a cell; None if there is none.

    Raises:
        UnusableRow: the number is less, not whole, or more than any run has.
    """
    return _count(row, column, leading_number(row, column))


def leading_number(row: TableRow, column: str) -> float | None:
    """The number at the start of a cell: `~250k (BLOOM)` gives 250,000; None if there is none.

    Raises:
        UnusableRow: it is more than 1e18.
    """
    match = _LEADING_NUMBER.match(row.text(column))
    value = float(match[1]) * (1000.0 if match[2] else 1.0) if match else None
    return _in_range(row, column, value)


def read_word(row: TableRow, column: str, meanings: Mapping[str, Meaning], meant: str) -> Meaning:
    """What a cell means by its first word in small letters; an empty cell has a meaning, too.

    Args:
        meanings: the meaning of each word, and of `""`.
        meant: the words in a sentence, for an error.

    Raises:
        UnusableRow: the cell begins with any other word.
    """
    text = row.text(column).lower()
    word = _FIRST_WORD.match(text)
    found = meanings.get(word[0] if word else text)
    if found is None:
        raise UnusableRow(f"{shown_cell(row, column)} is not {meant}")
    return found


def _count(row: TableRow, column: str, value: float | None) -> float | None:
    if value is not None and (value < 1 or value % 1):
        raise UnusableRow(f"{shown_cell(row, column)} is not a whole number of 1 or more")
    return value if value is None else at_most(column, value)


def _in_range(row: TableRow, column: str, value: float | None) -> float | None:
    if value is not None and not 0 <= value <= _MAX_VALUE:
        raise UnusableRow(f"{shown_cell(row, column)} is not a number from 0 to {_MAX_VALUE:g}")
    return value


def shown_cell(row: TableRow, column: str) -> str:
    """Column and cell for an error, as in `layers` = 'ten'; long cells are shortened."""
    text = row.text(column)
    short = text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
    return f"`{column}` = {short!r}"
