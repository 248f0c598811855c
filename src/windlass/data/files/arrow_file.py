"""Record batches of Parquet and Arrow files; `Any` is pyarrow's, which has no types."""

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from windlass.data.files.compressed_file import arrow_package, plain_suffix
from windlass.errors import DataError

_TABLE_ROWS = 1024
_FILE_MAGIC = b"ARROW1"
"""What an Arrow file begins with that is no stream."""


class ArrowTable(NamedTuple):
    """An open table."""

    schema: Any
    batches: Callable[[Sequence[str]], Iterator[Any]]
    """Its record batches, of some columns alone."""


@contextmanager
def open_arrow_table(path: Path) -> Iterator[ArrowTable]:
    """A Parquet file, or an Arrow file of either form, a stream or one with an index.

    Raises:
        DataError: pyarrow is missing.
        ValueError: it is none of them.
    """
    is_parquet = plain_suffix(path) == ".parquet"
    arrow = arrow_package(path)
    try:
        if is_parquet:
            with importlib.import_module("pyarrow.parquet").ParquetFile(path) as table:
                yield ArrowTable(
                    table.schema_arrow,
                    lambda names: table.iter_batches(batch_size=_TABLE_ROWS, columns=list(names)),
                )
            return
        with arrow.memory_map(str(path)) as source, _ipc_reader(path, source) as (schema, batches):
            yield ArrowTable(schema, lambda names: (batch.select(list(names)) for batch in batches))
    except ValueError as error:  # pyarrow's own errors are ValueErrors
        kind = "a Parquet" if is_parquet else "an Arrow"
        raise ValueError(f"`{path}` is not {kind} file: {error}") from None


@contextmanager
def _ipc_reader(path: Path, source: Any) -> Iterator[tuple[Any, Iterator[Any]]]:  # noqa: ANN401
    """The schema and the record batches of an Arrow file."""
    ipc = importlib.import_module("pyarrow.ipc")
    with path.open("rb") as file:
        has_index = file.read(len(_FILE_MAGIC)) == _FILE_MAGIC
    if has_index:
        with ipc.open_file(source) as reader:
            yield reader.schema, map(reader.get_batch, range(reader.num_record_batches))
    else:
        with ipc.open_stream(source) as reader:
            yield reader.schema, iter(reader)


def arrow_row_count(path: Path) -> int:
    """Number of rows of a Parquet or Arrow file.

    Raises:
        DataError: it is none.
    """
    try:
        with open_arrow_table(path) as table:
            return sum(batch.num_rows for batch in table.batches(table.schema.names[:1]))
    except ValueError as error:
        raise DataError(str(error)) from None


def arrow_batches(path: Path, columns: Sequence[str]) -> Iterator[Any]:
    """Record batches of some columns of a Parquet or Arrow file.

    Raises:
        DataError: it is none, or lacks a column.
    """
    try:
        with open_arrow_table(path) as table:
            for column in columns:
                if column not in table.schema.names:
                    names = ", ".join(f"`{name}`" for name in table.schema.names)
                    raise DataError(
                        f"`{path}` has no column `{column}`, but {names}; name yours as "
                        "`data.image_field` and `data.label_field`"
                    )
            yield from table.batches(columns)
    except ValueError as error:
        raise DataError(str(error)) from None
