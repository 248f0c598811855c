"""Reads the documents of one file as a stream, never a large file at once."""

import importlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, NamedTuple, Protocol

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


class TargetSpan(NamedTuple):
    """Characters of a document whose tokens are targets."""

    start: int
    end: int
    weight: float = 1.0
    """Weight of each of these tokens in the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDocument:
    """One document."""

    name: str
    text: str
    nbytes: int
    """Bytes of the text in UTF-8."""
    targets: tuple[TargetSpan, ...] | None = None
    """What of a conversation is learned, in order; None learns all of a text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadableDocument:
    """The reason why a document cannot be read, in its place."""

    message: str


class Row(NamedTuple):
    """A row of a table."""

    name: str
    """Name of its document."""
    where: str
    """Its place, for a message."""
    values: Mapping[str, object]
    """By column."""


class RowFormat(Protocol):
    """How the rows of a table become documents."""

    @property
    def reads_text(self) -> bool:
        """Whether a file that is no table is a text, too."""

    def columns(self, names: Sequence[str]) -> tuple[str, ...] | str:
        """Those of a table's columns that documents are made of, or what is wrong with them."""

    def documents(
        self, items: "Iterable[Row | TextDocument | UnreadableDocument]"
    ) -> "Iterator[TextDocument | UnreadableDocument]":
        """The documents in rows, but for empty ones; what is no row stays as it is."""


@dataclass(frozen=True, slots=True)
class TextRows:
    """Each row has its text in one field."""

    field: str
    reads_text: bool = True

    def columns(self, names: Sequence[str]) -> tuple[str, ...] | str:
        """The column with the text, or that there is none."""
        if self.field in names:
            return (self.field,)
        fields = ", ".join(f"`{name}`" for name in names) or "none"
        if _is_chat(names):
            way_out = "read conversations with `data.format=chat`"
        else:
            way_out = "name yours as `data.text_field`"
        return f"no field `{self.field}`; fields are {fields}; {way_out}"

    def documents(
        self, items: "Iterable[Row | TextDocument | UnreadableDocument]"
    ) -> "Iterator[TextDocument | UnreadableDocument]":
        """The text of each row, but for empty ones."""
        return documents_of_rows(items, self._document)

    def _document(self, row: Row) -> "TextDocument | UnreadableDocument | None":
        value = row.values[self.field]
        if value is None or value == "":
            return None
        if not isinstance(value, str):
            return UnreadableDocument(
                message=f"{row.where}: `{self.field}` is of type {type(value).__name__}, not text"
            )
        try:
            return TextDocument(name=row.name, text=value, nbytes=len(value.encode()))
        except UnicodeEncodeError as error:
            return UnreadableDocument(
                message=f"{row.where}: `{self.field}` has half a surrogate pair at character "
                f"{error.start}"
            )


def documents_of_rows(
    items: Iterable[Row | TextDocument | UnreadableDocument],
    document: Callable[[Row], TextDocument | UnreadableDocument | None],
) -> Iterator[TextDocument | UnreadableDocument]:
    """Items in which each row is replaced by its document; None leaves a row out."""
    for item in items:
        made = document(item) if isinstance(item, Row) else item
        if made is not None:
            yield made


def _is_chat(names: Sequence[str]) -> bool:
    return "messages" in names or {"prompt", "completion"} <= set(names)


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
    file: SourceFile, rows: RowFormat
) -> Iterator[TextDocument | UnreadableDocument]:
    """The documents of a file, or why one cannot be read; empty documents are skipped.

    Args:
        file: the file, read as JSON lines, Parquet, Arrow or text by its suffix.
        rows: what the rows of a table hold.

    Raises:
        DataError: a package that the format needs is missing.
    """
    return rows.documents(_items(file, rows))


def _items(file: SourceFile, rows: RowFormat) -> Iterator[Row | TextDocument | UnreadableDocument]:
    """The rows of a table, or the documents of a text."""
    try:
        match file.path.suffix:
            case ".jsonl":
                yield from _json_lines(file, rows)
            case ".parquet":
                yield from _parquet(file, rows)
            case ".arrow":
                with _arrow_file(file.path) as reader:
                    yield from _table(file, rows, reader.schema.names, reader)
            case _ if rows.reads_text:
                yield from _text_file(file)
            case _:
                yield UnreadableDocument(message=f"`{file.path}` is no table of conversations")
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


def _json_lines(file: SourceFile, rows: RowFormat) -> Iterator[Row | UnreadableDocument]:
    offset = 0
    with file.path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield _json_line(file, rows, number, offset, line)
            offset += len(line)


def _json_line(
    file: SourceFile, rows: RowFormat, number: int, offset: int, line: bytes
) -> Row | UnreadableDocument:
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
    columns = rows.columns(tuple(row))
    if isinstance(columns, str):
        return UnreadableDocument(message=f"{where}: {columns}")
    return Row(f"{file.name}:{number}", where, row)


def _parquet(file: SourceFile, rows: RowFormat) -> Iterator[Row | UnreadableDocument]:
    _arrow_package(file.path)
    parquet = importlib.import_module("pyarrow.parquet")
    try:
        with parquet.ParquetFile(file.path) as table:
            names = table.schema_arrow.names
            columns = rows.columns(names)
            wanted = [] if isinstance(columns, str) else list(columns)
            batches = table.iter_batches(batch_size=_TABLE_ROWS, columns=wanted)
            yield from _table(file, rows, names, batches)
    except ValueError as error:  # pyarrow's own errors are ValueErrors
        yield UnreadableDocument(message=f"`{file.path}` is not a Parquet file: {error}")


def _table(
    file: SourceFile, rows: RowFormat, names: Sequence[str], batches: Iterable[Any]
) -> Iterator[Row | UnreadableDocument]:
    """Rows of record batches (`Any` because pyarrow has no types)."""
    columns = rows.columns(names)
    if isinstance(columns, str):
        yield UnreadableDocument(message=f"`{file.path}`: {columns}")
        return
    number = 0
    for batch in batches:
        for row in batch.select(list(columns)).to_pylist():
            yield Row(f"{file.name}:{number}", f"{file.path}: row {number}", row)
            number += 1


def arrow_batches(path: Path, columns: Sequence[str]) -> Iterator[Any]:
    """Record batches of some columns of a Parquet or Arrow file (pyarrow has no types).

    Raises:
        DataError: it is none, or lacks a column.
    """
    if path.suffix != ".parquet":
        with _arrow_file(path) as reader:
            _require_columns(path, columns, reader.schema.names)
            for batch in reader:
                yield batch.select(list(columns))
        return
    _arrow_package(path)
    parquet = importlib.import_module("pyarrow.parquet")
    try:
        with parquet.ParquetFile(path) as table:
            _require_columns(path, columns, table.schema_arrow.names)
            yield from table.iter_batches(batch_size=_TABLE_ROWS, columns=list(columns))
    except ValueError as error:  # pyarrow's own errors are ValueErrors
        raise DataError(f"`{path}` is not a Parquet file: {error}") from None


def _require_columns(path: Path, columns: Sequence[str], names: Sequence[str]) -> None:
    for column in columns:
        if column not in names:
            raise DataError(
                f"`{path}` has no column `{column}`, but {', '.join(f'`{n}`' for n in names)}; "
                "name yours as `data.image_field` and `data.label_field`"
            )


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
