"""The journal: one append-only file per rank and attempt, one crc-checked record in each write.

The layout is documented in docs/reference/journal.md with a reader in plain Python. When a call
returns, its record is in the page cache: `kill -9` loses nothing, a power cut half a minute.
What a full disk refuses is kept in memory and written as soon as there is space.
"""

import contextlib
import json
import os
import struct
import threading
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from windlass.atomic_files import storage_errors
from windlass.errors import RecordError, StorageError

SCHEMA, ROW, EVENT = 1, 2, 3
HEAD = struct.Struct("<BHI")
"""Record kind, schema number, payload length in bytes; the crc follows."""
CRC = struct.Struct("<I")
HEADER_BYTES = HEAD.size + CRC.size
SYSTEM_PREFIX = "sys."
"""Begins all names of rows that measure the host and not a step."""
_SYNC_SECONDS = 30.0
_SCHEMA_ROWS = 1000
"""Rows after which their names are written again, in case that the record of them is damaged."""
_BACKLOG_BYTES = 2**26
"""Most bytes that wait for a full disk: days of steps of a second."""

JournalEventName = Literal[
    "meta", "seal", "evaluation", "checkpoint", "experts", "alert", "verdict", "end"
]  # fmt: skip


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
    """Rows of steps, in the order in which they were written."""
    system_rows: tuple[JournalRow, ...] = ()
    """Measurements of the host (`sys.cpu` and others) while the step before was the last one."""
    events: tuple[JournalEvent, ...] = ()
    read_bytes: int = 0
    """Offset in bytes of the end of the last whole record."""
    skipped: tuple[range, ...] = ()
    """Ranges of bytes that hold no whole record, because one is damaged or torn, or rows whose
    names are lost; none in an intact file."""

    @property
    def unread_bytes(self) -> int:
        """Number of bytes in `skipped`."""
        return sum(map(len, self.skipped))

    @property
    def end(self) -> JournalEvent | None:
        """The event that ended the attempt; None if it still runs or was killed."""
        return next((event for event in reversed(self.events) if event.name == "end"), None)

    @property
    def meta(self) -> Mapping[str, Any]:
        """The fields of the opening event; empty if there is none."""
        return next((event.fields for event in self.events if event.name == "meta"), {})


class _Schema:
    """The names of some rows, as a writer needs them for each row."""

    __slots__ = ("head", "head_crc", "layout", "record", "rows")

    def __init__(self, number: int, names: tuple[str, ...]) -> None:
        self.layout = struct.Struct(f"<qd{len(names)}d")
        self.head = HEAD.pack(ROW, number, self.layout.size)
        self.head_crc = zlib.crc32(self.head)
        self.record = _record(SCHEMA, number, json.dumps(names).encode())
        self.rows = 0


class JournalWriter:
    """Appends to a new journal, from any thread.

    A disk that takes no more records ends nothing: they are kept, up to 64 MiB, and written before
    the next one that it takes. `fault` says so meanwhile, and `flush` and `close` raise it.

    Args:
        path: a file that does not exist yet.

    Raises:
        RecordError: the file exists; a journal has one writer for ever.
        StorageError: the disk is full or closed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._schemas: dict[tuple[str, ...], _Schema] = {}
        self._backlog = bytearray()
        self._dropped = 0
        self._lock = threading.Lock()
        self._synced = time.monotonic()
        self.fault: str | None = None
        """Why records wait in memory; None if the file has them all."""
        self.last_step = 0
        """The step of the last row; 0 before the first."""
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
            timestamp: seconds since 1970; None is now.

        Raises:
            RecordError: the file was deleted or moved.
            StorageError: the journal is closed.
        """
        self.require_present()
        names, now = tuple(values), time.time() if timestamp is None else timestamp
        with self._lock:
            schema = self._schemas.get(names)
            if schema is None:
                schema = self._schemas[names] = _Schema(len(self._schemas), names)
            payload = schema.layout.pack(step, now, *values.values())
            record = schema.head + CRC.pack(zlib.crc32(payload, schema.head_crc)) + payload
            if schema.rows % _SCHEMA_ROWS < 2:  # twice, as damage often hits one record only
                record = schema.record + record
            schema.rows += 1
            self.last_step = step
            self._write(record)
        if time.monotonic() - self._synced > _SYNC_SECONDS:
            self._synced = time.monotonic()
            with contextlib.suppress(RuntimeError):  # the system has no more threads
                # A busy disk may take seconds, for which no step should wait.
                threading.Thread(target=self._sync, daemon=True).start()

    def append_event(self, name: JournalEventName, fields: Mapping[str, object]) -> None:
        """Appends an event and waits until it is on the disk, if that takes it.

        Args:
            fields: JSON values; `time` among them is when it happened, which is now if it is left
                out.

        Raises:
            RecordError: the file was deleted or moved.
            StorageError: the journal is closed.
        """
        self.require_present()
        content = {"event": name, "time": time.time(), **fields}
        record = _record(EVENT, 0, json.dumps(content, separators=(",", ":")).encode())
        with self._lock:
            self._write(record)
        self._sync()

    def flush(self) -> None:
        """Writes the records that wait, and returns when all are on the disk.

        Raises:
            StorageError: the disk does not take them, and why.
        """
        with self._lock:
            self._write(b"")
        self._sync()
        if self.fault is not None:
            raise StorageError(self.fault)

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
        """Writes what waits, and closes the file; closing twice is harmless.

        Raises:
            StorageError: the disk does not take all records.
        """
        if self._file is None:
            return
        try:
            self.flush()
        finally:
            os.close(self._file)
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, record: bytes) -> None:
        """Writes what waits and one record; what the disk refuses waits for the next call."""
        if self._file is None:
            raise StorageError(f"journal `{self._path}` is closed")
        if len(self._backlog) + len(record) > _BACKLOG_BYTES:
            self._dropped += 1
            record = b""
            for schema in self._schemas.values():
                schema.rows = 0  # its names may be in what is dropped; the next row has them again
        self._backlog += record
        try:
            while self._backlog:
                del self._backlog[: os.write(self._file, self._backlog)]
        except OSError as error:
            self.fault = _describe(error, self._path)
            return
        self.fault = None
        if self._dropped:
            lost = {"event": "alert", "time": time.time(), "lost_records": self._dropped}
            self._dropped = 0
            self._write(_record(EVENT, 0, json.dumps(lost).encode()))

    def _sync(self) -> None:
        """Asks the system to put the file on the disk; not under the lock, as it may take long."""
        self._synced = time.monotonic()
        if self._file is None:
            return
        try:
            os.fsync(self._file)
        except OSError as error:
            self.fault = _describe(error, self._path)


def _describe(error: OSError, path: Path) -> str:
    """The sentence of a `StorageError` about a journal."""
    try:
        with storage_errors(path):
            raise error
    except (StorageError, OSError) as known:
        return str(known)


def _identity(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino


def _record(kind: int, schema: int, payload: bytes) -> bytes:
    head = HEAD.pack(kind, schema, len(payload))
    return head + CRC.pack(zlib.crc32(payload, zlib.crc32(head))) + payload
