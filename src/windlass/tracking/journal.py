"""The journal: one append-only file per rank and attempt, one crc-checked record in each write.

The layout is documented in docs/journal.md with a reader in plain Python. When a call returns, its
record is in the page cache: `kill -9` loses nothing, a power cut at most half a minute.
"""

import json
import os
import struct
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from windlass.atomic_files import storage_errors
from windlass.errors import RecordError, StorageError

SCHEMA, ROW, EVENT = 1, 2, 3
_HEAD = struct.Struct("<BHI")
"""Record kind, schema number, payload length in bytes; the crc follows."""
_CRC = struct.Struct("<I")
_HEADER_BYTES = _HEAD.size + _CRC.size
_SYNC_SECONDS = 30.0
_END_BYTES = 8192

JournalEventName = Literal["meta", "seal", "evaluation", "checkpoint", "alert", "end"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalRow:
    """Named numbers of one step."""

    step: int
    time: float
    """Seconds since 1970 on the writer's clock."""
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEvent:
    """A rare event of a run: a checkpoint, an evaluation, its end."""

    name: str
    """A `JournalEventName`, or a name that a later version added."""
    time: float
    """Seconds since 1970 on the writer's clock."""
    fields: Mapping[str, Any]
    """Any JSON values; each event name has its own fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """The readable part of one journal file."""

    rows: tuple[JournalRow, ...] = ()
    events: tuple[JournalEvent, ...] = ()
    read_bytes: int = 0
    """Offset in bytes of the end of the last whole record."""
    unread_bytes: int = 0
    """Bytes that belong to no whole record, because one is damaged or torn; 0 in an intact file."""

    @property
    def end(self) -> JournalEvent | None:
        """The event that ended the attempt; None if it still runs or was killed."""
        return next((event for event in reversed(self.events) if event.name == "end"), None)

    @property
    def meta(self) -> Mapping[str, Any]:
        """The fields of the opening event; empty if there is none."""
        return next((event.fields for event in self.events if event.name == "meta"), {})


class JournalWriter:
    """Appends to a new journal; rows from one thread, events from any thread.

    Args:
        path: a file that does not exist yet.

    Raises:
        RecordError: the file exists; a journal has one writer for ever.
        StorageError: the disk is full or closed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._schemas: dict[tuple[str, ...], tuple[struct.Struct, bytes, int]] = {}
        self._unwritten = b""
        self._write_lock = threading.Lock()
        self._synced = time.monotonic()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        with storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._file: int | None = os.open(path, flags, 0o644)
            except FileExistsError:
                raise RecordError(
                    f"journal `{path}` already has a writer; open the next attempt"
                ) from None
            self._identity = _identity(os.fstat(self._file))

    def append_row(
        self, step: int, values: Mapping[str, float], *, timestamp: float | None = None
    ) -> None:
        """Appends the numbers of one step in one write call, which takes a few microseconds.

        Args:
            step: number of the step.
            values: its numbers by name.
            timestamp: seconds since 1970; None is now.

        Raises:
            RecordError: the file was deleted or moved.
            StorageError: the disk is full; the missing bytes are written before the next record.
        """
        self.require_present()
        schema = self._schemas.get(tuple(values)) or self._new_schema(tuple(values))
        layout, head, head_crc = schema
        now = time.time() if timestamp is None else timestamp
        payload = layout.pack(step, now, *values.values())
        self._append(head + _CRC.pack(zlib.crc32(payload, head_crc)) + payload)
        if time.monotonic() - self._synced > _SYNC_SECONDS:
            self._sync()

    def append_event(self, name: JournalEventName, fields: Mapping[str, object]) -> None:
        """Appends an event and waits until it is on the disk.

        Args:
            name: its name.
            fields: JSON values; `time` among them is when it happened, which is now if it is left
                out.

        Raises:
            RecordError: the file was deleted or moved.
            StorageError: the disk is full; the missing bytes are written before the next record.
        """
        self.require_present()
        content = {"event": name, "time": time.time(), **fields}
        payload = json.dumps(content, separators=(",", ":")).encode()
        self._append(_record(EVENT, 0, payload))
        self._sync()

    def require_present(self) -> None:
        """Refuses to go on if the file is no longer where it was made.

        Raises:
            RecordError: the run folder was deleted or moved.
        """
        try:
            if _identity(self._path.stat()) == self._identity:
                return
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError:  # a disk that does not answer now may do so later
            return
        raise RecordError(
            f"the run folder `{self._path.parent.parent}` was deleted or moved while the run was "
            "going on, so that it stops; move it back and resume it, or start it again"
        )

    def close(self) -> None:
        """Syncs and closes the file; closing twice is harmless."""
        if self._file is not None:
            with storage_errors(self._path):
                self._sync()
            os.close(self._file)
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _new_schema(self, names: tuple[str, ...]) -> tuple[struct.Struct, bytes, int]:
        number = len(self._schemas)
        self._append(_record(SCHEMA, number, json.dumps(names).encode()))
        layout = struct.Struct(f"<qd{len(names)}d")
        head = _HEAD.pack(ROW, number, layout.size)
        schema = (layout, head, zlib.crc32(head))
        self._schemas[names] = schema
        return schema

    def _append(self, record: bytes) -> None:
        """Writes one record in one call; on a full disk the rest is kept for the next call."""
        if self._file is None:
            raise StorageError(f"journal `{self._path}` is closed")
        with self._write_lock, storage_errors(self._path):
            self._unwritten += record
            while self._unwritten:
                self._unwritten = self._unwritten[os.write(self._file, self._unwritten) :]

    def _sync(self) -> None:
        if self._file is not None:
            with storage_errors(self._path):
                os.fsync(self._file)
        self._synced = time.monotonic()


def _identity(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino


def read_journal(path: Path) -> Journal:
    """Reads all whole records; bytes of torn or damaged ones are skipped and counted.

    Raises:
        RecordError: the file is missing or cannot be read.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RecordError(f"journal `{path}` cannot be read: {error.strerror}") from None
    return _parse(content, 0, {})


def read_head_and_tail(path: Path) -> Journal:
    """Reads only the first and last records of a journal: at most 16 KiB, however long the run.

    Raises:
        RecordError: the file is missing or cannot be read.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size <= 2 * _END_BYTES:
                return _parse(file.read(), 0, {})
            head = file.read(_END_BYTES)
            file.seek(size - _END_BYTES)
            tail = file.read(_END_BYTES)
    except OSError as error:
        raise RecordError(f"journal `{path}` cannot be read: {error.strerror}") from None
    schemas: dict[int, tuple[str, ...]] = {}
    first = _parse(head, 0, schemas)
    last = _parse(tail, _next_record(tail, 0), schemas)
    return Journal(
        rows=first.rows + last.rows,
        events=first.events + last.events,
        read_bytes=size - _END_BYTES + last.read_bytes,
        unread_bytes=last.unread_bytes,
    )


def _parse(content: bytes, start: int, schemas: dict[int, tuple[str, ...]]) -> Journal:
    rows: list[JournalRow] = []
    events: list[JournalEvent] = []
    end, skipped = start, 0
    for offset, kind, schema, payload in _records(content, start):
        skipped += offset - end
        end = offset + _HEADER_BYTES + len(payload)
        if kind == SCHEMA:
            schemas[schema] = tuple(json.loads(payload))
        elif kind == ROW and schema in schemas:
            rows.append(_row(payload, schemas[schema]))
        elif kind == EVENT:
            fields = json.loads(payload)
            events.append(
                JournalEvent(name=fields.pop("event"), time=fields.pop("time"), fields=fields)
            )
    return Journal(
        rows=tuple(rows),
        events=tuple(events),
        read_bytes=end,
        unread_bytes=skipped + len(content) - end,
    )


def _row(payload: bytes, names: tuple[str, ...]) -> JournalRow:
    step, seconds, *values = struct.unpack(f"<qd{len(names)}d", payload)
    return JournalRow(step=step, time=seconds, values=dict(zip(names, values, strict=True)))


def _records(content: bytes, offset: int) -> Iterator[tuple[int, int, int, bytes]]:
    """Offset, kind, schema number and payload of all whole records from `offset` on."""
    while offset < len(content):
        record = _record_at(content, offset)
        if record is None:
            offset = _next_record(content, offset + 1)
        else:
            yield offset, *record
            offset += _HEADER_BYTES + len(record[2])


def _next_record(content: bytes, offset: int) -> int:
    """Where the first whole record of a known kind begins, or the length of the content."""
    for start in range(offset, len(content) - _HEADER_BYTES + 1):
        if SCHEMA <= content[start] <= EVENT and _record_at(content, start):
            return start
    return len(content)


def _record_at(content: bytes, offset: int) -> tuple[int, int, bytes] | None:
    """Kind, schema number and payload of the record at `offset`; None if there is no whole one."""
    if offset + _HEADER_BYTES > len(content):
        return None
    head = content[offset : offset + _HEAD.size]
    kind, schema, length = _HEAD.unpack(head)
    begin = offset + _HEADER_BYTES
    payload = content[begin : begin + length]
    if len(payload) < length:
        return None
    (crc,) = _CRC.unpack_from(content, offset + _HEAD.size)
    if zlib.crc32(payload, zlib.crc32(head)) != crc:
        return None
    return kind, schema, payload


def _record(kind: int, schema: int, payload: bytes) -> bytes:
    head = _HEAD.pack(kind, schema, len(payload))
    return head + _CRC.pack(zlib.crc32(payload, zlib.crc32(head))) + payload
