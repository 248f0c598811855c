"""Reads journals: all whole records, whatever is damaged between them, and what is added later."""

import hashlib
import json
import math
import os
import re
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from windlass.atomic_files import open_regular_file
from windlass.errors import RecordError
from windlass.tracking.journal import (
    EVENT,
    HEAD,
    HEADER_BYTES,
    ROW,
    SCHEMA,
    SYSTEM_PREFIX,
    Journal,
    JournalEvent,
    JournalRow,
)

_LATEST = 4e9
_END_BYTES = 2**15
_KNOWN_KIND = re.compile(rb"[\x01-\x03]")
_STEP_AND_TIME_BYTES = 16
"""Bytes of a row before its values, which have eight each."""
_Schemas = dict[tuple[int, int], tuple[str, ...]]
"""The names of rows by the number of their schema and the bytes of a row."""
_SEARCHED_BYTES, _CLAIM_BYTES = 2**28, 2**10
"""Bytes that are checked in search of whole records behind what is damaged, and what each place
counts for where one may begin: a file that somebody made can claim a long record at every byte."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedRows:
    """All rows with the same names, as they lie in a file."""

    names: tuple[str, ...]
    offsets: list[int]
    """Where the record of each row begins in the file."""
    payloads: list[bytes]
    """An i64 step, an f64 time, then an f64 for each name."""

    @property
    def is_system(self) -> bool:
        """Whether the rows measure the host and not a step."""
        return any(name.startswith(SYSTEM_PREFIX) for name in self.names)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JournalRecords:
    """The whole records of a part of a journal, its rows still packed."""

    rows: tuple[PackedRows, ...]
    events: tuple[JournalEvent, ...]
    read_bytes: int
    """Offset in the file of the end of the last whole record."""
    skipped: tuple[range, ...]
    """As `Journal.skipped`."""

    def journal(self) -> Journal:
        """The same records, each row by itself."""
        return Journal(
            rows=_unpacked(rows for rows in self.rows if not rows.is_system),
            system_rows=_unpacked(rows for rows in self.rows if rows.is_system),
            events=self.events,
            read_bytes=self.read_bytes,
            skipped=self.skipped,
        )


def calendar_time(seconds: float) -> float:
    """The same time, in seconds since 1970; 0 or the year 2096 if no run can have been then.

    A record that somebody made may say NaN, 1e300 or a number of a thousand digits.
    """
    if isinstance(seconds, float) and math.isnan(seconds):
        return 0.0
    return float(min(max(seconds, 0), _LATEST))


class JournalCursor:
    """Reads a journal that is still being written, each time from where it ended before."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._schemas: _Schemas = {}
        self.offset = 0
        """Bytes that are read: the end of the last whole record."""

    def read(self) -> JournalRecords:
        """The whole records that were added since the last call.

        A record of which only a part is there counts as skipped, until a later call finds it whole.

        Raises:
            RecordError: the file is missing or cannot be read.
        """
        try:
            with open_regular_file(self._path) as file:
                file.seek(self.offset)
                content = file.read()
        except OSError as error:
            raise _unreadable(self._path, error) from None
        records = _parse(content, self.offset, self._schemas)
        self.offset = records.read_bytes
        return records


def read_journal(path: Path) -> Journal:
    """Reads all whole records; torn or damaged ones are skipped and named.

    Raises:
        RecordError: the file is missing or cannot be read.
    """
    return JournalCursor(path).read().journal()


def parse_journal(content: bytes) -> Journal:
    """The journal that some bytes are, as `read_journal` reads it from a file."""
    return parse_records(content).journal()


def parse_records(content: bytes) -> JournalRecords:
    """The records of a journal, its rows still packed."""
    return _parse(content, 0, {})


class RawRecord(NamedTuple):
    """One whole record as it lies in a file."""

    offset: int
    """Where it begins."""
    kind: int
    content: bytes
    """With its header."""

    @property
    def step(self) -> int | None:
        """The step of a row; None for any other record."""
        if self.kind != ROW or len(self.content) < HEADER_BYTES + _STEP_AND_TIME_BYTES:
            return None
        return int.from_bytes(self.content[HEADER_BYTES:][:8], "little", signed=True)


def parse_raw_records(content: bytes) -> tuple[list[RawRecord], JournalRecords]:
    """All whole records of a journal as they lie in it, in order, and what they say."""
    scan = _scan(content, 0)
    raw = [
        RawRecord(at, head[0], content[at : at + HEADER_BYTES + HEAD.unpack(head)[2]])
        for head, offsets in scan.offsets.items()
        for at in offsets
    ]
    return sorted(raw), _records(scan, {})


def journal_writer_id(content: bytes) -> str | None:
    """The SHA-256 of the first record of a journal, in hexadecimal; None if it has none.

    It tells the writer, whose clock the record has in it.
    """
    begin, _ = _next_record(content, 0, _SEARCHED_BYTES)
    if begin == len(content):
        return None
    end = begin + HEADER_BYTES + HEAD.unpack_from(content, begin)[2]
    return hashlib.sha256(content[begin:end]).hexdigest()


def read_head_and_tail(path: Path) -> Journal:
    """Reads only the first and last records of a journal: at most 64 KiB, however long the run.

    Raises:
        RecordError: the file is missing or cannot be read.
    """
    schemas: _Schemas = {}
    try:
        with open_regular_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size <= 2 * _END_BYTES:
                return _parse(file.read(), 0, schemas).journal()
            head = file.read(_END_BYTES)
            file.seek(size - _END_BYTES)
            tail = file.read(_END_BYTES)
    except OSError as error:
        raise _unreadable(path, error) from None
    first = _parse(head, 0, schemas).journal()
    begin, _ = _next_record(tail, 0, _SEARCHED_BYTES)
    last = _parse(tail[begin:], size - len(tail) + begin, schemas).journal()
    return Journal(
        rows=first.rows + last.rows,
        system_rows=first.system_rows + last.system_rows,
        events=first.events + last.events,
        read_bytes=last.read_bytes,
        skipped=last.skipped,
    )


def _unreadable(path: Path, error: OSError) -> RecordError:
    return RecordError(f"journal `{path}` cannot be read: {error.strerror}")


def _unpacked(groups: Iterable[PackedRows]) -> tuple[JournalRow, ...]:
    """The rows of all groups, in the order of the file."""
    found: list[tuple[int, JournalRow]] = []
    for group in groups:
        layout = struct.Struct(f"<qd{len(group.names)}d")
        unpacked = layout.iter_unpack(b"".join(group.payloads))
        for offset, (step, seconds, *values) in zip(group.offsets, unpacked, strict=True):
            named = dict(zip(group.names, values, strict=True))
            found.append((offset, JournalRow(step=step, time=seconds, values=named)))
    return tuple(row for _, row in sorted(found, key=lambda item: item[0]))


@dataclass(slots=True)
class _Scan:
    """The whole records of a part of a file, by their heads: kind, schema number and length."""

    end: int
    """Where the last one ends."""
    gaps: list[range] = field(default_factory=list)
    """What lies between them and behind the last one."""
    offsets: dict[bytes, list[int]] = field(default_factory=dict)
    payloads: dict[bytes, list[bytes]] = field(default_factory=dict)


def _scan(content: bytes, base: int) -> _Scan:
    """Finds all whole records, in about half a microsecond each."""
    scan = _Scan(base)
    head, size, record_bytes, head_crc = b"", len(content), HEADER_BYTES, 0
    at = end = 0
    left = _SEARCHED_BYTES
    while at + HEADER_BYTES <= size:
        if content[at : at + HEAD.size] != head:
            head = content[at : at + HEAD.size]
            record_bytes = HEADER_BYTES + HEAD.unpack(head)[2]
            head_crc = zlib.crc32(head)
        payload = content[at + HEADER_BYTES : at + record_bytes]
        crc = content[at + HEAD.size : at + HEADER_BYTES]
        if at + record_bytes > size or zlib.crc32(payload, head_crc).to_bytes(4, "little") != crc:
            at, searched = _next_record(content, at + 1, left)
            left -= searched
            continue
        if at > end:
            scan.gaps.append(range(base + end, base + at))
        scan.offsets.setdefault(head, []).append(base + at)
        scan.payloads.setdefault(head, []).append(payload)
        at = end = at + record_bytes
    if size > end:
        scan.gaps.append(range(base + end, base + size))
    scan.end = base + end
    return scan


def _next_record(content: bytes, at: int, most: int) -> tuple[int, int]:
    """Where the first whole record of a known kind begins, or the length of the content.

    Args:
        most: bytes to check at most; where they do not suffice, no record is found.

    Returns:
        The place, and how many bytes were checked.
    """
    searched = 0
    for match in _KNOWN_KIND.finditer(content, at):
        start = match.start()
        if len(content) - start < HEADER_BYTES or searched > most:
            break
        end = start + HEADER_BYTES + HEAD.unpack_from(content, start)[2]
        searched += _CLAIM_BYTES
        if end <= len(content):
            searched += end - start
            if _is_record(content, start, end):
                return start, searched
    return len(content), searched


def _is_record(content: bytes, start: int, end: int) -> bool:
    """Whether a record lies between two offsets, undamaged."""
    crc = zlib.crc32(content[start : start + HEAD.size])
    crc = zlib.crc32(content[start + HEADER_BYTES : end], crc)
    return crc.to_bytes(4, "little") == content[start + HEAD.size : start + HEADER_BYTES]


def _parse(content: bytes, base: int, schemas: _Schemas) -> JournalRecords:
    """The records of a part of a journal, which begins at the offset `base` of the file."""
    return _records(_scan(content, base), schemas)


def _records(scan: _Scan, schemas: _Schemas) -> JournalRecords:
    """What the records of a part of a journal say.

    Args:
        schemas: the names that are known so far; those in the part are added, and hold for all of
            its rows, as the record of names may be damaged where it stood first. The first names
            of a number and length stay: no record that somebody adds renames the rows before it.
    """
    events: list[tuple[int, JournalEvent]] = []
    row_heads: list[bytes] = []
    for head, offsets in scan.offsets.items():
        kind, schema, _ = HEAD.unpack(head)
        if kind == SCHEMA:
            for names in map(_names, scan.payloads[head]):
                if names is not None:
                    schemas.setdefault((schema, _STEP_AND_TIME_BYTES + 8 * len(names)), names)
        elif kind == EVENT:
            found = zip(offsets, map(_event, scan.payloads[head]), strict=True)
            events += ((at, event) for at, event in found if event is not None)
        elif kind == ROW:
            row_heads.append(head)
    rows: list[PackedRows] = []
    skipped = scan.gaps
    for head in row_heads:
        _, schema, length = HEAD.unpack(head)
        known, offsets = schemas.get((schema, length)), scan.offsets[head]
        if known is None:
            skipped += (range(at, at + HEADER_BYTES + length) for at in offsets)
        else:
            rows.append(PackedRows(names=known, offsets=offsets, payloads=scan.payloads[head]))
    return JournalRecords(
        rows=tuple(rows),
        events=tuple(event for _, event in sorted(events, key=lambda item: item[0])),
        read_bytes=scan.end,
        skipped=tuple(_joined(sorted(skipped, key=lambda gap: gap.start))),
    )


def _joined(ranges: Iterable[range]) -> Iterator[range]:
    """The same bytes in as few ranges as they take."""
    last: range | None = None
    for current in ranges:
        if last is not None and last.stop == current.start:
            last = range(last.start, current.stop)
            continue
        if last is not None:
            yield last
        last = current
    if last is not None:
        yield last


def _names(payload: bytes) -> tuple[str, ...] | None:
    """The names in a schema record; None if it holds anything else."""
    names = _json(payload)
    known = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return tuple(names) if known else None


def _event(payload: bytes) -> JournalEvent | None:
    """The event in a record; None if it holds anything else."""
    content = _json(payload)
    if not isinstance(content, dict):
        return None
    name, time = content.pop("event", None), content.pop("time", None)
    if not isinstance(name, str) or not isinstance(time, int | float):
        return None
    return JournalEvent(name=name, time=calendar_time(time), fields=content)


def _json(payload: bytes) -> Any:  # noqa: ANN401  whatever JSON holds
    try:
        return json.loads(payload)
    except (ValueError, RecursionError):
        return None
