"""Reads the documents of one file as a stream, never a large file at once."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from windlass.data.files import (
    COMPRESSED_SUFFIXES,
    CSV_SUFFIXES,
    JsonLayout,
    csv_fields,
    csv_rows,
    json_array_rows,
    json_layout,
    open_arrow_table,
    open_text_file,
    plain_suffix,
)
from windlass.errors import DataError

CHUNK_BYTES = 16 * 2**10
"""Largest chunk of a text that is split, at its last line end."""
_CHUNKS, _MIN_CHUNK_BYTES = 64, 2**10
"""A small text is split into about 64 smaller chunks, so that a share of them can be held out."""
_MAX_DOCUMENT_BYTES = 2**20
"""Largest text file of a folder that is one document."""
_SNIFF_BYTES = 8 * 2**10
TABLE_SUFFIXES = frozenset({".jsonl", ".ndjson", ".parquet", ".arrow"})
"""Endings of the names of tables."""
_MAYBE_TABLES = frozenset({"", ".json", ".txt", ".log"})
"""Endings of the names of texts that may be tables of JSON."""
_MARK = "\N{BYTE ORDER MARK}"
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
    json: JsonLayout | None = None
    """How rows stand in it, of a file that its content alone tells from other text."""
    names_rows: bool = False
    """Whether rows of JSON must be meant, so that others than the wanted ones are an error."""

    def table_format(self, rows: "RowFormat | None" = None) -> str:
        """The suffix of a table, `array` for one of JSON, or nothing for a text.

        Args:
            rows: what rows are wanted; None tells tables by their names alone.
        """
        suffix = plain_suffix(self.path)
        if suffix in TABLE_SUFFIXES:
            return suffix
        if suffix in CSV_SUFFIXES and rows is not None:
            return "" if isinstance(rows.columns(csv_fields(self.path)), str) else "csv"
        if self.json is None or self.json.form == "object" or rows is None:
            return ""
        if not self.names_rows and isinstance(rows.columns(self.json.fields), str):
            return ""
        return "array" if self.json.form == "array" else ".jsonl"


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
    system: str | None = None
    """The system prompt that a conversation begins with; empty if it has none. None is a text, or a
    prompt and its completion, which no template surrounds."""
    read_answers: int = 0
    """Answers that are not learned, since the template leaves a part out as others follow."""


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


def find_json_layout(path: Path) -> JsonLayout | None:
    """How rows stand in a file of JSON whose name does not say that it is a table; None in others.

    Raises:
        DataError: a package is missing that uncompresses it.
    """
    if plain_suffix(path) not in _MAYBE_TABLES:
        return None
    try:
        return json_layout(path)
    except OSError:
        return None  # its reader says why


def looks_like_text(path: Path) -> bool:
    """Whether a file is text by its suffix or by its first bytes."""
    if plain_suffix(path) in _TEXT_SUFFIXES:
        return True
    try:
        with open_text_file(path) as file:
            head = file.read(_SNIFF_BYTES)
    except OSError:
        # One that is damaged is a text all the same, and its reader says what is wrong.
        return path.suffix.lower() in COMPRESSED_SUFFIXES and bool(plain_suffix(path))
    # The last character may be incomplete where reading stopped.
    slack = 3 if len(head) == _SNIFF_BYTES else 0
    return bool(head) and b"\0" not in head and _first_bad_byte(head) + slack >= len(head)


def read_documents(
    file: SourceFile, rows: RowFormat
) -> Iterator[TextDocument | UnreadableDocument]:
    """The documents of a file, or why one cannot be read; empty documents are skipped.

    Args:
        file: the file, read as JSON, Parquet, Arrow or text.

    Raises:
        DataError: a package that the format needs is missing.
    """
    return rows.documents(_items(file, rows))


def _items(file: SourceFile, rows: RowFormat) -> Iterator[Row | TextDocument | UnreadableDocument]:
    """The rows of a table, or the documents of a text."""
    try:
        match file.table_format(rows):
            case ".jsonl" | ".ndjson":
                yield from _json_lines(file, rows)
            case "array":
                yield from _json_array(file, rows)
            case ".parquet" | ".arrow":
                yield from _table(file, rows)
            case "csv":
                yield from _csv(file, rows)
            case _ if rows.reads_text:
                yield from _text_file(file)
            case _:
                yield UnreadableDocument(message=f"`{file.path}` is no table of conversations")
    except OSError as error:
        yield UnreadableDocument(message=f"`{file.path}` cannot be read: {error.strerror or error}")


def _text_file(file: SourceFile) -> Iterator[TextDocument | UnreadableDocument]:
    with open_text_file(file.path) as stream:
        # The size of what a compressed file holds is not known before it is read.
        head = stream.read(_MAX_DOCUMENT_BYTES + 1)
    is_small = len(head) <= _MAX_DOCUMENT_BYTES
    if file.single_document and is_small:
        item = _decoded(file.name, file.path, 0, head)
        if isinstance(item, UnreadableDocument) or item.text:
            yield item
        return
    size = max(_MIN_CHUNK_BYTES, len(head) // _CHUNKS) if is_small else CHUNK_BYTES
    with open_text_file(file.path) as stream:
        for offset, chunk in _chunks(stream, min(CHUNK_BYTES, size)):
            item = _decoded(f"{file.name}@{offset}", file.path, offset, chunk)
            if isinstance(item, UnreadableDocument) or item.text:
                yield item


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
        text = content.decode()
        if not offset and text.startswith(_MARK):
            # Windows writes it at the beginning of a file, and it is no part of the text.
            text, content = text[1:], content[len(_MARK.encode()) :]
        return TextDocument(name=name, text=text, nbytes=len(content))
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
    with open_text_file(file.path) as stream:
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
    return _row(f"{file.name}:{number}", where, row, rows)


def _json_array(file: SourceFile, rows: RowFormat) -> Iterator[Row | UnreadableDocument]:
    try:
        with open_text_file(file.path) as stream:
            for number, row in enumerate(json_array_rows(stream)):
                yield _row(f"{file.name}:{number}", f"{file.path}: row {number}", row, rows)
    except DataError as error:
        yield UnreadableDocument(message=f"{file.path}: {error}")


def _row(name: str, where: str, row: object, rows: RowFormat) -> Row | UnreadableDocument:
    """The row that a value of JSON is, or why it is none."""
    if not isinstance(row, dict):
        return UnreadableDocument(
            message=f"{where}: holds a {type(row).__name__}, not an object with fields"
        )
    columns = rows.columns(tuple(row))
    if isinstance(columns, str):
        return UnreadableDocument(message=f"{where}: {columns}")
    return Row(name, where, row)


def _table(file: SourceFile, rows: RowFormat) -> Iterator[Row | UnreadableDocument]:
    number = 0
    try:
        with open_arrow_table(file.path) as table:
            columns = rows.columns(table.schema.names)
            if isinstance(columns, str):
                yield UnreadableDocument(message=f"`{file.path}`: {columns}")
                return
            for batch in table.batches(columns):
                for values in batch.to_pylist():
                    row = {name: _without_nulls(value) for name, value in values.items()}
                    yield Row(f"{file.name}:{number}", f"{file.path}: row {number}", row)
                    number += 1
    except ValueError as error:
        yield UnreadableDocument(message=str(error))


def _without_nulls(value: Any) -> Any:  # noqa: ANN401  whatever a table holds
    """A value without the nulls that tables write for fields that an object does not have."""
    if isinstance(value, dict):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def _csv(file: SourceFile, rows: RowFormat) -> Iterator[Row | UnreadableDocument]:
    number = 0
    try:
        with open_text_file(file.path) as stream:
            for row in csv_rows(stream, plain_suffix(file.path)):
                yield _row(f"{file.name}:{number}", f"{file.path}: row {number}", row, rows)
                number += 1
    except ValueError as error:
        yield UnreadableDocument(message=f"{file.path}: row {number}: {error}")
