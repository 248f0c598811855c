"""Tables of values with commas or tabs between them."""

import csv
import io
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from windlass.data.files.compressed_file import open_text_file, plain_suffix

_DELIMITERS: Mapping[str, str] = {".csv": ",", ".tsv": "\t"}
CSV_SUFFIXES = frozenset(_DELIMITERS)
"""Endings of the names of such tables."""
_MOST_CHARACTERS = 2**30


def csv_fields(path: Path) -> tuple[str, ...]:
    """The names in a file's first line; none if it cannot be read."""
    with suppress(OSError, ValueError, StopIteration), open_text_file(path) as stream:
        return tuple(next(csv_rows(stream, plain_suffix(path))))
    return ()


def csv_rows(stream: BinaryIO, suffix: str) -> Iterator[dict[str, str]]:
    """The values of each row, by the names in the first line.

    Args:
        stream: the file, which whoever has opened it closes.
        suffix: one of `CSV_SUFFIXES`.

    Raises:
        ValueError: it is no such table.
    """
    csv.field_size_limit(_MOST_CHARACTERS)
    lines = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
    try:
        for row in csv.DictReader(lines, delimiter=_DELIMITERS[suffix], strict=True):
            if None in row or None in row.values():
                raise ValueError("it has another number of values than names in the first line")
            yield row
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error.reason}") from None
    except csv.Error as error:
        raise ValueError(str(error)) from None
    finally:
        lines.detach()
