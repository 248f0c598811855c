"""Reads TensorBoard's event files by its own accumulator: scalars of each folder as one run."""

import logging
import os
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from windlass.errors import RecordError
from windlass.integrations.portable_run import (
    PortableRun,
    clean_text,
    flat_config,
    rows_of_points,
)
from windlass.integrations.wire_format import masked_crc32c
from windlass.schema import ConfigValue

EVENT_FILE = "tfevents"
"""Part of the name of every event file."""

_LENGTH = struct.Struct("<QI")
_MOST_RECORD_BYTES = 2**28
_HPARAMS_START = "_hparams_/session_start_info"
_KEPT = {
    "scalars": 0, "tensors": 0, "images": 1, "audio": 1, "histograms": 1, "distributions": 1,
}  # fmt: skip
"""Events of each kind that are kept of a tag; 0 keeps all."""

Point = tuple[int, float, str, float]


def read_tensorboard(folder: Path, files: Sequence[Path]) -> PortableRun:
    """The run whose event files lie in `folder`.

    What a writer that was restarted at a step has written behind it before is left out, as in
    TensorBoard.

    Args:
        folder: the folder of the run, which names it.
        files: its event files, in any order.

    Raises:
        RecordError: a file cannot be read, or TensorBoard is not installed.
    """
    ordered = sorted(files, key=lambda file: file.name)
    place = folder.resolve()
    left_out: Counter[str] = Counter()
    accumulator = _accumulated(folder, ordered, left_out)
    points = sorted(_points(accumulator, left_out), key=lambda point: point[1])
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
        config=flat_config(_settings(accumulator)),
        project=clean_text(place.parent.name) or None,
        left_out=left_out,
    )


def _accumulated(folder: Path, files: Sequence[Path], left_out: Counter[str]) -> Any:  # noqa: ANN401  a package without types
    """What TensorBoard makes of the events of a run."""
    try:
        accumulators = import_module("tensorboard.backend.event_processing.event_accumulator")
        events = import_module("tensorboard.compat.proto.event_pb2")
    except ImportError as error:
        raise RecordError(
            f"event files are read by TensorBoard, which lacks `{error.name}`; install it with "
            "`pip install 'windlass[tensorboard]'`"
        ) from None
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it warns of what it purges
    accumulator = accumulators.EventAccumulator(str(folder), size_guidance=_KEPT)
    for file in files:
        for record in _records(file, left_out):
            try:
                event = events.Event.FromString(record)
            except Exception:  # noqa: BLE001  protobuf has several kinds of errors
                left_out["damaged records"] += 1
                continue
            # Its own loaders end a file at a damaged record, and read one of any length.
            accumulator._ProcessEvent(event)  # noqa: SLF001
            for value in event.summary.value:
                if not value.HasField("simple_value") and not value.HasField("tensor"):
                    left_out[f"{_plugin(accumulator, value.tag) or 'other'} summaries"] += 1
    return accumulator


def _points(accumulator: Any, left_out: Counter[str]) -> Iterator[Point]:  # noqa: ANN401
    """The scalars of all tags; tensors of other plugins are counted as left out."""
    make_ndarray = import_module("tensorboard.util.tensor_util").make_ndarray
    tags = accumulator.Tags()
    for tag in tags["scalars"]:
        for event in accumulator.Scalars(tag):
            yield event.step, event.wall_time, clean_text(tag), float(event.value)
    for tag in tags["tensors"]:
        plugin = _plugin(accumulator, tag)
        for event in accumulator.Tensors(tag):
            try:
                values = make_ndarray(event.tensor_proto) if plugin in ("scalars", "") else None
            except (TypeError, ValueError):
                values = None
            if values is not None and values.size == 1 and values.dtype.kind in "fiub":
                yield event.step, event.wall_time, clean_text(tag), float(values.item())
            else:
                left_out[f"{plugin or 'other'} summaries"] += 1


def _plugin(accumulator: Any, tag: str) -> str:  # noqa: ANN401
    """Name of the plugin that a tag is for; empty without one."""
    metadata = accumulator.summary_metadata.get(tag)
    return clean_text(metadata.plugin_data.plugin_name) if metadata is not None else ""


def _settings(accumulator: Any) -> dict[str, ConfigValue]:  # noqa: ANN401
    """Settings that `add_hparams` wrote."""
    metadata = accumulator.summary_metadata.get(_HPARAMS_START)
    if metadata is None:
        return {}
    hparams = import_module("tensorboard.plugins.hparams.plugin_data_pb2")
    try:
        data = hparams.HParamsPluginData.FromString(metadata.plugin_data.content)
    except Exception:  # noqa: BLE001  protobuf has several kinds of errors
        return {}
    kinds: dict[str, Callable[[Any], ConfigValue]] = {
        "number_value": float,
        "string_value": clean_text,
        "bool_value": bool,
    }
    return {
        clean_text(key): kinds[kind](getattr(value, kind))
        for key, value in data.session_start_info.hparams.items()
        if (kind := value.WhichOneof("kind")) in kinds
    }


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
