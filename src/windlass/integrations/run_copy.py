"""Reads a run folder as other trackers can hold it."""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from windlass.errors import RecordError, RequestError
from windlass.integrations.portable_run import PortableRun, clean_text, number
from windlass.record import read_run_entry
from windlass.schema import CONFIG_FILE, ConfigValue, RunConfig, RunState
from windlass.tracking import (
    LOCK_FILE,
    JournalCursor,
    JournalEvent,
    JournalRow,
    Series,
    calendar_time,
    is_locked,
    journal_files,
    read_series,
)

HELD_OUT_LOSS = "held_out_loss"
_SYSTEM_PREFIX = "sys."


def read_run(folder: Path) -> PortableRun:
    """The run in a folder: the measurements of rank 0 without those of the host.

    Raises:
        RecordError: the folder holds no run.
    """
    entry = read_run_entry(folder)
    columns = entry.columns
    events = _events(folder)
    opening = (event.fields for event in events if event.name == "meta")
    project = next((fields["project"] for fields in opening if "project" in fields), None)
    evaluations = {
        step: JournalRow(step=step, time=event.time, values={HELD_OUT_LOSS: loss})
        for event in events
        if event.name == "evaluation"
        if isinstance(step := event.fields.get("step"), int)
        if (loss := number(event.fields.get("loss"))) is not None
    }
    rows = [*_rows(read_series(folder)), *evaluations.values()]
    running = is_locked(folder / LOCK_FILE)
    notes = cast(Sequence[str], columns["notes"])
    return PortableRun(
        origin="windlass",
        origin_id=str(columns["id"]),
        name=str(columns["name"]),
        rows=sorted(rows, key=lambda row: (row.step, row.time)),
        started=_seconds(columns["started"]),
        ended=_seconds(columns["ended"]) or _seconds(columns["started"]),
        state=None if running else cast(RunState, columns["state"]),
        config=_config(folder) or cast(Mapping[str, ConfigValue], entry.settings),
        tags=tuple(cast(Sequence[str], columns["tags"])),
        notes="\n\n".join(notes),
        project=None if project is None else str(project),
        group=cast(str | None, columns["group"]),
        facts={"host": str(columns["host"])} if columns["host"] else {},
    )


def _config(folder: Path) -> Mapping[str, ConfigValue]:
    """The settings that a loop gave or a tracker kept; empty if there are none."""
    try:
        return RunConfig.load(folder / CONFIG_FILE).values
    except (RequestError, RecordError):
        return {}


def _events(folder: Path) -> Sequence[JournalEvent]:
    """The events of rank 0 in all attempts; none of a journal that cannot be read."""
    events: list[JournalEvent] = []
    for file in journal_files(folder):
        if file.rank == 0:
            with contextlib.suppress(RecordError):
                events += JournalCursor(file.path).read().events
    return events


def _seconds(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _rows(series: Mapping[str, Series]) -> Sequence[JournalRow]:
    """Rows of all numbers that were written together; a name may come twice at one moment."""
    rows: dict[tuple[int, float, int], dict[str, float]] = {}
    for name, one in series.items():
        if name.startswith(_SYSTEM_PREFIX):
            continue
        seen: dict[tuple[int, float], int] = {}
        for step, time, value in zip(
            one.steps.tolist(), one.times.tolist(), one.values.tolist(), strict=True
        ):
            again = seen.get((step, time), 0)
            seen[step, time] = again + 1
            rows.setdefault((step, time, again), {})[clean_text(name)] = value
    return [
        JournalRow(step=step, time=calendar_time(time), values=values)
        for (step, time, _), values in rows.items()
    ]
