"""Runs and all their steps as Parquet files, for DuckDB, pandas, polars and others."""

import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from windlass.atomic_files import atomic_write, atomic_writer, require_writable
from windlass.errors import RecordError
from windlass.record.queries import Progress
from windlass.record.run_row import COLUMNS, RunRow
from windlass.tracking import read_series

if TYPE_CHECKING:
    import pyarrow as pa

RUNS_FILE, STEPS_FILE = "runs.parquet", "steps.parquet"
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
"""A spreadsheet takes a text that begins with one of these as a formula."""


def export_parquet(
    rows: Sequence[RunRow], folder: Path, progress: Progress | None = None
) -> tuple[Path, Path]:
    """Writes `runs.parquet` and `steps.parquet` into a folder, and returns both paths.

    `runs` has a line for each run; settings, tags and other lists are JSON. `steps` has a line for
    each number of rank 0: `run` (the id), `series`, `step`, `time` (seconds since 1970) and
    `value`, each number as exact as in the journal.

    Args:
        folder: made if it is missing.

    Raises:
        RecordError: pyarrow is missing.
    """
    try:
        import pyarrow.parquet as pq
    except ImportError:
        raise RecordError(
            "Parquet files need pyarrow; install it with `pip install 'windlass[parquet]'`"
        ) from None
    runs_path, steps_path = folder / RUNS_FILE, folder / STEPS_FILE
    for path in (runs_path, steps_path):
        require_writable(path)
    # Both appear together, or neither where the disk is full.
    with atomic_writer(runs_path) as runs_file, atomic_writer(steps_path) as steps_file:
        pq.write_table(_runs_table(rows), runs_file, compression="zstd")
        _write_steps(rows, steps_file, progress)
        for file in (runs_file, steps_file):
            file.flush()
            os.fsync(file.fileno())
    return runs_path, steps_path


def export_csv(rows: Sequence[RunRow], path: Path) -> None:
    """Writes a line for each run, in which no text is a formula to a spreadsheet.

    Settings are columns of their own, by dotted key.
    """
    keys = sorted({key for row in rows for key in row.settings})
    names = [column.name for column in COLUMNS if column.name != "settings"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
    writer.writerow(csv_cell(name) for name in (*names, *keys))
    for row in rows:
        values = [getattr(row, name) for name in names]
        writer.writerow(csv_cell(v) for v in (*values, *(row.settings.get(key) for key in keys)))
    atomic_write(path, text.getvalue())


def csv_cell(value: object) -> object:
    """A value as a spreadsheet shows it; a quote before a text keeps it from being a formula."""
    if value is None or isinstance(value, bool | int | float):
        return "" if value is None else value
    if isinstance(value, Mapping | tuple):
        value = json.dumps(value, ensure_ascii=False)
    text = str(value)
    return f"'{text}" if text.startswith(_FORMULA_STARTS) else text


def _runs_table(rows: Sequence[RunRow]) -> "pa.Table":
    import pyarrow as pa

    types = {
        "text": pa.string(), "json": pa.string(), "flag": pa.bool_(),
        "count": pa.int64(), "bytes": pa.int64(),
    }  # fmt: skip
    columns = {
        name: pa.array(
            [_cell(getattr(row, name), unit) for row in rows], types.get(unit, pa.float64())
        )
        for name, unit in COLUMNS
    }
    return pa.table(columns)


def _cell(value: object, unit: str) -> object:
    if unit == "json":
        return json.dumps(value, ensure_ascii=False)
    return str(value) if isinstance(value, Path) else value


def _write_steps(rows: Sequence[RunRow], file: BinaryIO, progress: Progress | None) -> None:
    """Writes the numbers of all runs, one after another, so that one run is in memory."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {
        "run": pa.string(), "series": pa.string(),
        "step": pa.int64(), "time": pa.float64(), "value": pa.float64(),
    }  # fmt: skip
    schema = pa.schema(columns)
    encoding = {
        "step": "DELTA_BINARY_PACKED", "time": "BYTE_STREAM_SPLIT", "value": "BYTE_STREAM_SPLIT"
    }  # fmt: skip
    with pq.ParquetWriter(
        file, schema, compression="zstd", use_dictionary=["run", "series"], column_encoding=encoding
    ) as writer:
        for done, row in enumerate(rows, start=1):
            if batches := _batches(row, schema):
                writer.write_table(pa.Table.from_batches(batches))
            if progress is not None:
                progress("writing runs", done, len(rows))


def _batches(row: RunRow, schema: "pa.Schema") -> "list[pa.RecordBatch]":
    """The numbers of one run, a batch for each series."""
    import pyarrow as pa

    return [
        pa.record_batch(
            [
                pa.repeat(row.id, len(series)),
                pa.repeat(name, len(series)),
                series.steps,
                series.times,
                series.values,
            ],
            schema=schema,
        )
        for name, series in sorted(read_series(row.folder).items())
    ]
