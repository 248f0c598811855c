"""Reads W&B's offline files: records of protocol buffers in LevelDB's log format.

Field numbers are those of `wandb_internal.proto`; the frame is that of wandb's transaction log.
"""

import json
import struct
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import BinaryIO

from windlass.atomic_files import open_regular_file
from windlass.errors import RecordError
from windlass.integrations.portable_run import PortableRun, clean_text, flat_config, number
from windlass.integrations.wire_format import FieldValue, read_fields, signed, text
from windlass.schema import RunState
from windlass.tracking import JournalRow

WANDB_HEAD = b":W&B"
_HEAD_BYTES = 7
_BLOCK_BYTES = 32768
_MOST_RECORD_BYTES = 2**26
_FRAME = struct.Struct("<IHB")
_FULL, _FIRST, _LAST = 1, 2, 4
_HISTORY, _CONFIG, _RUN, _EXIT = 2, 5, 17, 18
_SKIPPED = {7: "system metrics", 8: "artifacts", 10: "alerts", 13: "lines of output"}
"""Records that are not taken over, by field number."""
_ITEM_KEY, _ITEM_NESTED_KEY, _ITEM_JSON = 1, 2, 16
_OWN_KEYS = frozenset({"_step", "_timestamp", "_runtime"})


@dataclass(slots=True)
class _Content:
    """What the files of one run say, gathered record by record."""

    run: dict[int, FieldValue] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    config: dict[str, object] = field(default_factory=dict)
    rows: list[JournalRow] = field(default_factory=list)
    exit_code: int | None = None
    left_out: Counter[str] = field(default_factory=Counter)


def read_wandb(files: Iterable[Path], warnings: list[str]) -> Iterator[PortableRun]:
    """The runs of offline files; the files of a run that was resumed are one run.

    Args:
        files: the files.
        warnings: gets a sentence for each that cannot be read, or is none of W&B's.
    """
    # A file is named for its run's id, which two projects may both have given.
    for _, same_name in groupby(sorted(files, key=_file_order), key=lambda file: file.name):
        runs: dict[tuple[str, str], list[tuple[float, Path, _Content]]] = defaultdict(list)
        for file in same_name:
            try:
                content = _read_file(file)
            except RecordError as error:
                warnings.append(str(error))
                continue
            key = (text(content.run.get(3, b"")), text(content.run.get(1, file.stem.encode())))
            runs[key].append((_start(content.run), file, content))
        for (project, run_id), parts in sorted(runs.items()):
            contents = [content for *_, content in sorted(parts, key=_part_order)]
            yield _portable(project, run_id, contents)


def _file_order(file: Path) -> tuple[str, Path]:
    return file.name, file


def _part_order(part: tuple[float, Path, _Content]) -> tuple[float, str]:
    return part[0], part[1].name


def _portable(project: str, run_id: str, parts: list[_Content]) -> PortableRun:
    first, last = parts[0], parts[-1]
    rows = [row for part in parts for row in part.rows]
    config = {key: value for part in parts for key, value in part.config.items()}
    left_out = sum((part.left_out for part in parts), Counter[str]())
    started = _start(first.run)
    exit_state: RunState = "finished" if last.exit_code == 0 else "broken"
    return PortableRun(
        origin="wandb",
        origin_id=f"{project}/{run_id}",
        name=clean_text(text(last.run.get(8, b"")) or run_id),
        rows=rows,
        started=started,
        ended=max((row.time for row in rows), default=started),
        state=None if last.exit_code is None else exit_state,
        config=flat_config({key: value for key, value in config.items() if key != "_wandb"}),
        tags=tuple(clean_text(tag) for tag in last.tags),
        notes=clean_text(text(last.run.get(9, b""))),
        project=clean_text(project),
        group=clean_text(text(last.run.get(6, project.encode()))),
        facts={"host": clean_text(text(last.run[13]))} if 13 in last.run else {},
        left_out=left_out,
    )


def _start(run: Mapping[int, FieldValue]) -> float:
    """Seconds since 1970 at which the process of a file began; 0 if it does not say."""
    start = run.get(17)
    if not isinstance(start, bytes):
        return 0.0
    seconds = dict(read_fields(start))
    return signed(seconds.get(1, 0)) + signed(seconds.get(2, 0)) / 1e9


def _read_file(path: Path) -> _Content:
    content = _Content()
    try:
        with open_regular_file(path) as file:
            if not file.read(_HEAD_BYTES).startswith(WANDB_HEAD):
                raise RecordError(f"`{path}` is no offline file of W&B, which begins with `:W&B`")
            for record in _records(file, content.left_out):
                _take_fields(content, record)
    except OSError as error:
        raise RecordError(f"`{path}` cannot be read: {error.strerror}") from None
    return content


def _take_fields(content: _Content, record: bytes) -> None:
    try:
        for kind, value in read_fields(record):
            if isinstance(value, bytes):
                _take(content, kind, value)
    except RecordError:
        content.left_out["damaged records"] += 1


def _records(file: BinaryIO, left_out: Counter[str]) -> Iterator[bytes]:
    """The records of a transaction log; a damaged block is left at its end, as LevelDB does.

    Args:
        file: the log, read up to the end of its head; a block of it is in memory at a time.
        left_out: counts what is damaged.
    """
    parts: list[bytes] = []
    block = file.read(_BLOCK_BYTES - _HEAD_BYTES)
    while block:
        offset = 0
        while offset + _FRAME.size <= len(block):
            crc, length, kind = _FRAME.unpack_from(block, offset)
            part = block[offset + _FRAME.size : offset + _FRAME.size + length]
            is_whole = len(part) == length
            if not is_whole or zlib.crc32(part, zlib.crc32(bytes((kind,)))) != crc:
                left_out["damaged or torn blocks"] += 1
                parts = []
                break
            offset += _FRAME.size + length
            parts = [part] if kind in (_FULL, _FIRST) else [*parts, part]
            if sum(map(len, parts)) > _MOST_RECORD_BYTES:
                left_out["damaged records"] += 1
                parts = []
            elif kind in (_FULL, _LAST):
                yield b"".join(parts)
                parts = []
        block = file.read(_BLOCK_BYTES)


def _take(content: _Content, kind: int, record: bytes) -> None:
    """Adds one record to the content of its run."""
    if kind == _HISTORY:
        content.rows += _history(record, content.left_out)
    elif kind == _RUN:
        fields = list(read_fields(record))
        content.run = dict(fields)
        content.tags = tuple(text(value) for number, value in fields if number == 10)
        settings = content.run.get(4)
        _configure(content, settings if isinstance(settings, bytes) else b"")
    elif kind == _CONFIG:
        _configure(content, record)
    elif kind == _EXIT:
        content.exit_code = signed(dict(read_fields(record)).get(1, 0))
    elif kind in _SKIPPED:
        content.left_out[_SKIPPED[kind]] += 1


def _configure(content: _Content, record: bytes) -> None:
    """Applies what a record changes in the settings."""
    for change, item in read_fields(record):
        if change in (1, 2) and isinstance(item, bytes):
            path, value = _item(item)
            if change == 2:
                content.config.pop(".".join(path), None)
            else:
                content.config[".".join(path)] = value


def _history(record: bytes, left_out: Counter[str]) -> Iterator[JournalRow]:
    """The row of one `log` call; nothing if it holds no number."""
    step: int | None = None
    raw: dict[str, object] = {}
    for part, value in read_fields(record):
        if part == 1 and isinstance(value, bytes):
            path, item = _item(value)
            raw[".".join(path)] = item
        elif part == 2 and isinstance(value, bytes):
            step = signed(dict(read_fields(value)).get(1, 0))
    values: dict[str, float] = {}
    for name, item in flat_config(raw).items():
        exact = number(item)
        if name in _OWN_KEYS:
            continue
        if exact is None:
            left_out["values that are no numbers"] += 1
        else:
            values[name] = exact
    if step is None:  # as old versions wrote it
        written = raw.get("_step")
        step = written if isinstance(written, int) else 0
    if values:
        yield JournalRow(step=step, time=number(raw.get("_timestamp")) or 0.0, values=values)


def _item(item: bytes) -> tuple[tuple[str, ...], object]:
    """Key, part by part, and value of an item of the history or the settings."""
    path: list[str] = []
    value: object = None
    for part, content in read_fields(item):
        if part in (_ITEM_KEY, _ITEM_NESTED_KEY):
            path.append(clean_text(text(content)))
        elif part == _ITEM_JSON:
            try:
                value = json.loads(text(content))
            except (ValueError, RecursionError):
                value = text(content)
    return tuple(path), value
