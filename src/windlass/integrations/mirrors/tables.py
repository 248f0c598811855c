"""Writes the numbers of a run as one table: CSV or Parquet, a row for each row of the journal."""

import csv
import io
import json
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path

from windlass.atomic_files import atomic_write, atomic_writer, require_output_file
from windlass.errors import RequestError
from windlass.integrations.portable_run import PortableRun

_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


def write_csv(run: PortableRun, place: str, _documents: Mapping[str, Path]) -> str:
    """Writes a CSV file and returns its path: `step`, `time`, then a column for each name.

    Numbers have all their digits. A name that a spreadsheet would run as a formula begins with an
    apostrophe.

    Raises:
        StorageError: the file cannot be written.
    """
    path = Path(place)
    require_output_file(path)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = _names(run)
    writer.writerow(["step", "time", *map(_cell, names)])
    for row in run.rows:
        cells = (repr(row.values[name]) if name in row.values else "" for name in names)
        writer.writerow([row.step, repr(row.time), *cells])
    atomic_write(path, text.getvalue())
    return str(path)


def write_parquet(run: PortableRun, place: str, _documents: Mapping[str, Path]) -> str:
    """Writes a Parquet file and returns its path: columns as in CSV, settings in its metadata.

    Raises:
        RequestError: pyarrow is not installed.
        StorageError: the file cannot be written.
    """
    path = Path(place)
    require_output_file(path)
    try:
        pyarrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError:
        raise RequestError(
            "`parquet:` needs pyarrow; install it by `pip install windlass[parquet]`"
        ) from None
    names = _names(run)
    columns = {
        "step": pyarrow.array([row.step for row in run.rows], pyarrow.int64()),
        "time": pyarrow.array([row.time for row in run.rows], pyarrow.float64()),
        **{
            name: pyarrow.array(list(_column(run, name)), pyarrow.float64())
            for name in names
            if name not in ("step", "time")
        },
    }
    about = {"id": run.origin_id, "name": run.name, "config": dict(run.config), "tags": run.tags}
    table = pyarrow.table(columns).replace_schema_metadata({"windlass": json.dumps(about)})
    with atomic_writer(path) as file:
        parquet.write_table(
            table,
            file,
            compression="zstd",
            use_dictionary=False,
            use_byte_stream_split=[name for name in columns if name != "step"],
        )
    return str(path)


def _names(run: PortableRun) -> tuple[str, ...]:
    return tuple(sorted({name for row in run.rows for name in row.values}))


def _column(run: PortableRun, name: str) -> Iterator[float | None]:
    return (row.values.get(name) for row in run.rows)


def _cell(name: str) -> str:
    return f"'{name}" if name.startswith(_FORMULA_STARTS) else name
