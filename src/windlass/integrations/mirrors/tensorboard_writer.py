"""Writes TensorBoard's event files without its package."""

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

from windlass.atomic_files import atomic_write, storage_errors
from windlass.integrations.portable_run import PortableRun
from windlass.integrations.wire_format import field, masked_crc32c
from windlass.schema import ConfigValue

_VERSION = "brain.Event:2"
_DOUBLE_TYPE, _STRING_TYPE = 2, 7
_SCALAR_CLASS, _TENSOR_CLASS = 1, 2
_FILE = "events.out.tfevents.{start:010d}.windlass.{id}.v2"


def write_tensorboard(run: PortableRun, place: str, _documents: Mapping[str, Path]) -> str:
    """Writes one event file to a folder of the run below `place`, and returns its path.

    The same run makes the same file, and a longer run appends to it, so that TensorBoard follows.
    Values keep all 64 bits, as PyTorch's `add_scalar(double_precision=True)` writes them; settings
    are hyperparameters.

    Raises:
        StorageError: the folder cannot be written.
    """
    letters = (char if char.isalnum() or char in "-_. " else "-" for char in run.name)
    folder = f"{''.join(letters)[:120].strip('. ')}-{run.origin_id[-6:]}"
    name = _FILE.format(start=max(int(run.started), 0), id=run.origin_id)
    path = Path(place) / folder / name
    content = b"".join(_framed(event) for event in _events(run))
    with storage_errors(path):
        present = path.read_bytes() if path.is_file() else b""
        if not present or not content.startswith(present):
            atomic_write(path, content)
        elif len(content) > len(present):
            with path.open("ab") as file:
                file.write(content[len(present) :])
    return str(path)


def _events(run: PortableRun) -> Iterator[bytes]:
    yield field(1, run.started) + field(3, _VERSION)
    yield _event(run.started, 0, _settings(run))
    for row in run.rows:
        values = b"".join(_scalar(name, value) for name, value in row.values.items())
        yield _event(row.time, row.step, values)


def _event(time: float, step: int, values: bytes) -> bytes:
    return field(1, time) + field(2, step) + field(5, values)


def _scalar(tag: str, value: float) -> bytes:
    tensor = field(1, _DOUBLE_TYPE) + field(2, b"") + field(6, struct.pack("<d", value))
    return _value(tag, tensor, "scalars", b"", _SCALAR_CLASS)


def _settings(run: PortableRun) -> bytes:
    """The settings as hyperparameters."""
    hparams = b"".join(
        field(1, field(1, key) + field(2, _setting(value))) for key, value in run.config.items()
    )
    start = field(3, hparams + field(4, run.group or "") + field(5, run.started))
    nothing = field(1, _STRING_TYPE) + field(2, b"")
    return _value("_hparams_/session_start_info", nothing, "hparams", start, _TENSOR_CLASS)


def _setting(value: ConfigValue) -> bytes:
    """A `google.protobuf.Value`."""
    if isinstance(value, bool):
        return field(4, int(value))
    if isinstance(value, int | float):
        return field(2, float(value))
    return field(3, value if isinstance(value, str) else json.dumps(value))


def _value(tag: str, tensor: bytes, plugin: str, content: bytes, data_class: int) -> bytes:
    """One value of a summary."""
    metadata = field(1, field(1, plugin) + field(2, content)) + field(4, data_class)
    return field(1, field(1, tag) + field(8, tensor) + field(9, metadata))


def _framed(event: bytes) -> bytes:
    length = struct.pack("<Q", len(event))
    return b"".join(
        (
            length,
            struct.pack("<I", masked_crc32c(length)),
            event,
            struct.pack("<I", masked_crc32c(event)),
        )
    )
