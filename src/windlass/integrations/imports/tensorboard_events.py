"""Reads TensorBoard's event files: scalars of each folder as one run."""

import os
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from windlass.errors import RecordError
from windlass.integrations.portable_run import (
    PortableRun,
    clean_text,
    flat_config,
    rows_of_points,
)
from windlass.integrations.wire_format import (
    FieldValue,
    double,
    masked_crc32c,
    read_fields,
    read_varint,
    signed,
    text,
)
from windlass.schema import ConfigValue

EVENT_FILE = "tfevents"
"""Part of the name of every event file."""

_LENGTH = struct.Struct("<QI")
_FLOAT = struct.Struct("<f")
_WALL_TIME, _STEP, _SUMMARY = 1, 2, 5
_SUMMARY_VALUE = 1
_TAG, _SIMPLE_VALUE, _TENSOR, _METADATA = 1, 2, 8, 9
_DTYPE, _CONTENT, _FLOAT_VALUES, _DOUBLE_VALUES, _INT_VALUES, _INT64_VALUES = 1, 4, 5, 6, 7, 10
_CODES = {1: "f", 2: "d", 3: "i", 9: "q"}
"""`struct` code of a tensor's number by its `DataType`."""
_MOST_RECORD_BYTES = 2**28
_HPARAMS_START = "_hparams_/session_start_info"

Point = tuple[int, float, str, float]


def read_tensorboard(folder: Path, files: Sequence[Path]) -> PortableRun:
    """The run whose event files lie in `folder`.

    Args:
        folder: the folder of the run, which names it.
        files: its event files, in any order.

    Raises:
        RecordError: a file cannot be read.
    """
    ordered = sorted(files, key=lambda file: file.name)
    place = folder.resolve()
    left_out: Counter[str] = Counter()
    config: dict[str, ConfigValue] = {}
    plugins: dict[str, str] = {}
    points: list[Point] = []
    for file in ordered:
        for event in _records(file, left_out):
            try:
                points += _scalars(event, plugins, config, left_out)
            except RecordError:
                left_out["damaged records"] += 1
    times = [time for _, time, _, _ in points]
    return PortableRun(
        origin="tensorboard",
        # The name of an event file holds its time, host and process; a copy of it keeps it.
        origin_id=f"{place.name}/{ordered[0].name}",
        name=clean_text(place.name),
        rows=rows_of_points(points),
        started=min(times, default=0.0),
        ended=max(times, default=0.0),
        state="finished",  # event files do not say how a run ended
        config=flat_config(config),
        project=clean_text(place.parent.name) or None,
        left_out=left_out,
    )


def _records(path: Path, left_out: Counter[str]) -> Iterator[bytes]:
    """The whole records of one file; a damaged one is skipped while its length can be trusted."""
    try:
        with path.open("rb") as file:
            rest = os.fstat(file.fileno()).st_size
            while head := file.read(_LENGTH.size):
                rest -= len(head)
                length, crc = _LENGTH.unpack(head) if len(head) == _LENGTH.size else (rest, 0)
                if length + 4 > min(rest, _MOST_RECORD_BYTES) or masked_crc32c(head[:8]) != crc:
                    left_out["torn ends of event files"] += 1
                    return
                record = file.read(length)
                rest -= length + 4
                if masked_crc32c(record) == int.from_bytes(file.read(4), "little"):
                    yield record
                else:
                    left_out["damaged records"] += 1
    except OSError as error:
        raise RecordError(f"`{path}` cannot be read: {error.strerror}") from None


def _scalars(
    event: bytes,
    plugins: dict[str, str],
    config: dict[str, ConfigValue],
    left_out: Counter[str],
) -> Iterator[Point]:
    """The scalars of one event; settings that it holds are added to `config`."""
    time, step, summaries = 0.0, 0, []
    for number, value in read_fields(event):
        if number == _WALL_TIME:
            time = double(value)
        elif number == _STEP:
            step = signed(value)
        elif number == _SUMMARY and isinstance(value, bytes):
            summaries.append(value)
    for summary in summaries:
        for number, value in read_fields(summary):
            if number != _SUMMARY_VALUE or not isinstance(value, bytes):
                continue
            fields = dict(read_fields(value))
            tag = clean_text(text(fields.get(_TAG, b"")))
            plugin, content = _plugin(fields.get(_METADATA))
            plugins.setdefault(tag, plugin)
            scalar = _scalar(fields, plugins[tag])
            if scalar is not None:
                yield step, time, tag, scalar
            elif tag == _HPARAMS_START:
                config |= _hparams(content)
            else:
                left_out[f"{plugins[tag] or 'other'} summaries"] += 1


def _scalar(fields: dict[int, FieldValue], plugin: str) -> float | None:
    """The number of a summary value; None if it is a picture, a text or a histogram."""
    simple, tensor = fields.get(_SIMPLE_VALUE), fields.get(_TENSOR)
    if isinstance(simple, bytes) and len(simple) == _FLOAT.size:
        (number,) = _FLOAT.unpack(simple)
        return float(number)
    if not isinstance(tensor, bytes) or plugin not in ("scalars", ""):
        return None
    parts = dict(read_fields(tensor))
    dtype = parts.get(_DTYPE)
    code = _CODES.get(dtype) if isinstance(dtype, int) else None
    content = next(
        (parts[key] for key in (_CONTENT, _FLOAT_VALUES, _DOUBLE_VALUES) if parts.get(key)), None
    )
    if code and isinstance(content, bytes) and len(content) == struct.calcsize(code):
        return float(struct.unpack(f"<{code}", content)[0])
    whole = parts.get(_INT_VALUES, parts.get(_INT64_VALUES))
    if isinstance(whole, bytes) and whole:
        whole = read_varint(whole, 0)[0]
    return float(signed(whole)) if isinstance(whole, int) else None


def _plugin(metadata: FieldValue | None) -> tuple[str, bytes]:
    """Name and content of the plugin that a summary value is for; empty without one."""
    if isinstance(metadata, bytes):
        for number, value in read_fields(metadata):
            if number == 1 and isinstance(value, bytes):
                fields = dict(read_fields(value))
                content = fields.get(2, b"")
                return text(fields.get(1, b"")), content if isinstance(content, bytes) else b""
    return "", b""


def _hparams(content: bytes) -> dict[str, ConfigValue]:
    """Settings that `add_hparams` wrote.

    Source: tensorboard, `plugins/hparams/plugin_data.proto`.
    """
    config: dict[str, ConfigValue] = {}
    for number, start in read_fields(content):
        if number != 3 or not isinstance(start, bytes):
            continue
        for part, entry in read_fields(start):
            if part == 1 and isinstance(entry, bytes):
                fields = dict(read_fields(entry))
                value = fields.get(2)
                key = clean_text(text(fields.get(1, b"")))
                config[key] = _setting(value) if isinstance(value, bytes) else None
    return config


def _setting(value: bytes) -> ConfigValue:
    """A `google.protobuf.Value` of a number, a text or a truth value."""
    for number, content in read_fields(value):
        if number == 2:
            return double(content)
        if number == 3:
            return clean_text(text(content))
        if number == 4:
            return bool(content)
    return None
