"""Tells tables of JSON from other text by their content, and reads arrays row by row."""

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from windlass.data.files.compressed_file import open_text_file
from windlass.errors import DataError

_SNIFF_BYTES = 4 * 2**20
"""Bytes within which the first row of a table ends, or it is taken for none."""
_SPACE = b" \t\r\n"
_BLOCK = 2**16
_BETWEEN = " \t\r\n,"
"""Characters between two rows of an array."""
_MARK = "\N{BYTE ORDER MARK}".encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonLayout:
    """How rows stand in a file of JSON."""

    form: Literal["lines", "array", "object"]
    """A row on each line, rows in one array, or one value that is no table."""
    fields: tuple[str, ...]
    """Fields of the first row, or of the one object."""


def json_layout(path: Path) -> JsonLayout | None:
    """How rows stand in a file, by its beginning; None if it does not begin as objects of JSON.

    Raises:
        OSError: it cannot be read.
        DataError: a package is missing that uncompresses it.
    """
    with open_text_file(path) as stream:
        head = stream.read(1024).removeprefix(_MARK).lstrip(_SPACE)
        if head[:1] not in (b"{", b"["):
            return None
        head += stream.read(_SNIFF_BYTES)
    if head[:1] == b"[":
        first = _first_object(head[1:].lstrip(_SPACE))
        return None if first is None else JsonLayout(form="array", fields=tuple(first))
    line, _, rest = head.partition(b"\n")
    row = _object(line)
    if row is not None and _object(rest.lstrip(_SPACE).partition(b"\n")[0]) is not None:
        return JsonLayout(form="lines", fields=tuple(row))
    first = _first_object(head)
    return None if first is None else JsonLayout(form="object", fields=tuple(first))


def json_array_rows(stream: BinaryIO) -> Iterator[Any]:
    """The values of an array, one after the other, of which the whole never is in memory.

    Args:
        stream: the file, whose first character is `[` according to its layout.

    Raises:
        DataError: it is no array of JSON; the message counts rows from 0.
    """
    text_stream = io.TextIOWrapper(stream, encoding="utf-8-sig")
    decoder, number = json.JSONDecoder(), 0
    try:
        text = text_stream.read(_BLOCK).lstrip()[1:]
        while not (text := text.lstrip(_BETWEEN)).startswith("]"):
            try:
                value, end = decoder.raw_decode(text)
            except ValueError as error:
                # The row goes on behind what was read, or it is none.
                more = text_stream.read(max(_BLOCK, len(text)))
                if not more:
                    raise DataError(f"row {number}: not JSON: {str(error).lower()}") from None
                text += more
                continue
            yield value
            number, text = number + 1, text[end:]
    except UnicodeDecodeError as error:
        raise DataError(f"after row {number}: not UTF-8: {error.reason}") from None
    except RecursionError as error:
        raise DataError(f"row {number}: cannot be read: {str(error).lower()}") from None
    finally:
        text_stream.detach()  # whoever has opened the file closes it


def _object(line: bytes) -> dict[str, Any] | None:
    """The object that a line is; None if it is none."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _first_object(content: bytes) -> dict[str, Any] | None:
    """The object that a text begins with; None if it begins with none."""
    try:
        value, _ = json.JSONDecoder().raw_decode(content.decode(errors="ignore"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
