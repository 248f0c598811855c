"""Reads the documents of one file as a stream, never a large file at once."""

import importlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

from windlass.errors import DataError

CHUNK_BYTES = 16 * 2**10
"""Largest chunk of a text that is split, at the last line end within it."""
_CHUNKS, _MIN_CHUNK_BYTES = 64, 2**10
"""A small text is split into about 64 smaller chunks, so that a share of them can be held out."""
_MAX_DOCUMENT_BYTES = 2**20
"""Largest text file of a folder that is one document."""
_SNIFF_BYTES = 8 * 2**10
_TABLE_ROWS = 1024
_TEXT_SUFFIXES = frozenset(
    {".txt", ".md", ".rst", ".tex", ".csv", ".tsv", ".html", ".htm", ".xml", ".json"}
    | {".yaml", ".yml", ".toml", ".ini", ".cfg", ".py", ".pyi", ".c", ".h", ".cc", ".cpp"}
    | {".hpp", ".cu", ".rs", ".go", ".js", ".ts", ".java", ".rb", ".sh", ".sql", ".lua", ".jl"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """One file of a corpus."""

    name: str
    """Path relative to the corpus, with `/` on every system; the split depends on it."""
    path: Path
    single_document: bool
    """Whether a text of moderate size is one document; otherwise it is split into chunks."""

    def rows(self) -> int:
        """Number of rows of an Arrow file."""
        with _arrow_file(self.path) as reader:
            return sum(batch.num_rows for batch in reader)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDocument:
    """One document."""

    name: str
    text: str
    nbytes: int
    """Bytes of the text in UTF-8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadableDocument:
    """The reason why a document cannot be read, in its place."""

    message: str


def looks_like_text(path: Path) -> bool:
    """Whether a file is text by its suffix or by its first bytes."""
    if path.suffix.lower() in _TEXT_SUFFIXES:
        return True
    try:
        with path.open("rb") as file:
            head = file.read(_SNIFF_BYTES)
    except OSError:
        return False
    # The last character may be incomplete where reading stopped.
    slack = 3 if len(head) == _SNIFF_BYTES else 0
    return bool(head) and b"\0" not in head and _first_bad_byte(head) + slack >= len(head)


def read_documents(
    file: SourceFile, text_field: str
) -> Iterator[TextDocument | UnreadableDocument]:
    """The documents of a file, or why one cannot be read; empty documents are skipped.

    Args:
        file: the file, read as JSON lines, Parquet, Arrow or text by its suffix.
        text_field: field of a table that holds the text.

    Raises:
        DataError: a package that the format needs is missing.
    """
    try:
        match file.path.suffix:
            case ".jsonl":
                yield from _json_lines(file, text_field)
            case ".parquet":
                yield from _parquet(file, text_field)
            case ".arrow":
                with _arrow_file(file.path) as reader:
                    yield from _table(file, text_field, reader.schema.names, reader)
            case _:
                yield from _text_file(file)
    except OSError as error:
        yield UnreadableDocument(message=f"`{file.path}` cannot be read: {error.strerror or error}")


def _text_file(file: SourceFile) -> Iterator[TextDocument | UnreadableDocument]:
    nbytes = file.path.stat().st_size
    if file.single_document and nbytes <= _MAX_DOCUMENT_BYTES:
        item = _decoded(file.name, file.path, 0, file.path.read_bytes())
        if isinstance(item, UnreadableDocument) or item.text:
            yield item
        return
    with file.path.open("rb") as stream:
        size = min(CHUNK_BYTES, max(_MIN_CHUNK_BYTES, nbytes // _CHUNKS))
        for offset, chunk in _chunks(stream, size):
            yield _decoded(f"{file.name}@{offset}", file.path, offset, chunk)


def _chunks(stream: BinaryIO, size: int) -> Iterator[tuple[int, bytes]]:
    """Chunks of at most `size` bytes with their offsets, split at line ends if there are any."""
    offset, buffer = 0, b""
    while buffer := buffer + stream.read(size - len(buffer)):
        end = len(buffer)
        if end == size:
            end = buffer.rfind(b"\n") + 1 or _character_end(buffer)
        yield offset, buffer[:end]
        offset, buffer = offset + end, buffer[end:]


def _character_end(content: bytes) -> int:
    """Last offset at which UTF-8 may be split: before a byte that begins a character."""
    for end in range(len(content) - 1, max(0, len(content) - 4), -1):
        if content[end] & 0xC0 != 0x80:
            return end
    return len(content)


def _decoded(
    name: str, path: Path, offset: int, content: bytes
) -> TextDocument | UnreadableDocument:
    try:
        return TextDocument(name=name, text=content.decode(), nbytes=len(content))
    except UnicodeDecodeError as error:
        position = offset + error.start
        return UnreadableDocument(
            message=f"`{path}` is not UTF-8: byte {position} is 0x{content[error.start]:02x}; "
            "convert it, or remove it from the corpus"
        )


def _first_bad_byte(content: bytes) -> int:
    """Offset of the first byte that is not UTF-8, or the length."""
    try:
        content.decode()
    except UnicodeDecodeError as error:
        return error.start
    return len(content)


def _json_lines(file: SourceFile, text_field: str) -> Iterator[TextDocument | UnreadableDocument]:
    offset = 0
    with file.path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                item = _json_line(file, text_field, number, offset, line)
                if item is not None:
                    yield item
            offset += len(line)


def _json_line(
    file: SourceFile, text_field: str, number: int, offset: int, line: bytes
) -> TextDocument | UnreadableDocument | None:
    where = f"{file.path}:{number}"
    decoded = _decoded(file.name, file.path, offset, line)
    if isinstance(decoded, UnreadableDocument):
        return decoded
    try:
        row = json.loads(decoded.text.rstrip("\r\n"))
    except json.JSONDecodeError as error:
        return UnreadableDocument(
            message=f"{where}: not JSON: {error.msg.lower()} at column {error.colno}"
        )
    except (
        ValueError,
        RecursionError,
    ) as error:  # a number that is too long, or brackets nested too deeply
        return UnreadableDocument(message=f"{where}: cannot be read: {str(error).lower()}")
    if not isinstance(row, dict):
        return UnreadableDocument(
            message=f"{where}: holds a {type(row).__name__}, not an object with fields"
        )
    if text_field not in row:
        return UnreadableDocument(message=f"{where}: {_no_field(text_field, row)}")
    return _cell(f"{file.name}:{number}", where, text_field, row[text_field])


def _parquet(file: SourceFile, text_field: str) -> Iterator[TextDocument | UnreadableDocument]:
    _arrow_package(file.path)
    parquet = importlib.import_module("pyarrow.parquet")
    try:
        with parquet.ParquetFile(file.path) as table:
            names = table.schema_arrow.names
            columns = [text_field] if text_field in names else []
            batches = table.iter_batches(batch_size=_TABLE_ROWS, columns=columns)
            yield from _table(file, text_field, names, batches)
    except ValueError as error:  # pyarrow's own errors are ValueErrors
        yield UnreadableDocument(message=f"`{file.path}` is not a Parquet file: {error}")


def _table(
    file: SourceFile, text_field: str, names: list[str], batches: Iterable[Any]
) -> Iterator[TextDocument | UnreadableDocument]:
    """Documents of record batches (`Any` because pyarrow has no types)."""
    if text_field not in names:
        yield UnreadableDocument(message=f"`{file.path}`: {_no_field(text_field, names)}")
        return
    number = 0
    for batch in batches:
        for value in batch.column(text_field).to_pylist():
            item = _cell(f"{file.name}:{number}", f"{file.path}: row {number}", text_field, value)
            number += 1
            if item is not None:
                yield item


def _cell(
    name: str, where: str, text_field: str, value: object
) -> TextDocument | UnreadableDocument | None:
    """The document in one field; None if it is empty."""
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        return UnreadableDocument(
            message=f"{where}: `{text_field}` is of type {type(value).__name__}, not text"
        )
    try:
        return TextDocument(name=name, text=value, nbytes=len(value.encode()))
    except UnicodeEncodeError as error:
        return UnreadableDocument(
            message=f"{where}: `{text_field}` has half a surrogate pair at character {error.start}"
        )


def _no_field(text_field: str, names: Iterable[str]) -> str:
    fields = ", ".join(f"`{name}`" for name in names) or "none"
    return f"no field `{text_field}`; fields are {fields}; name yours as `data.text_field`"


@contextmanager
def _arrow_file(path: Path) -> Iterator[Any]:
    """A reader of record batches of an Arrow stream (`Any` because pyarrow has no types)."""
    arrow = _arrow_package(path)
    ipc = importlib.import_module("pyarrow.ipc")
    try:
        with arrow.memory_map(str(path)) as source, ipc.open_stream(source) as reader:
            yield reader
    except ValueError as error:
        raise DataError(f"`{path}` is not an Arrow stream: {error}") from None


def _arrow_package(path: Path) -> ModuleType:
    try:
        return importlib.import_module("pyarrow")
    except ImportError:
        raise DataError(
            f"`{path}` needs the package `pyarrow`; install `windlass[parquet]`"
        ) from None
