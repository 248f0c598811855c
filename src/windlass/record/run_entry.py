"""What the catalogue keeps of one run folder: its row, its settings and its series."""

import contextlib
import json
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np

from windlass.atomic_files import read_regular_file
from windlass.errors import RecordError
from windlass.record.annotations import annotation_files, read_annotations
from windlass.record.pyramid import Curve, SeriesSummary, curve_of, summary_of
from windlass.record.run_row import Setting
from windlass.schema import (
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    PLAN_FILE,
    REQUEST_FILE,
    RunState,
)
from windlass.tracking import (
    SYSTEM_PREFIX,
    JournalCursor,
    JournalEvent,
    JournalFile,
    JournalRecords,
    Series,
    calendar_time,
    changed_files,
    continued,
    describe_parent,
    describe_skipped,
    first_attempt_of_plan,
    input_fingerprints,
    journal_faults,
    journal_files,
    main_series,
    read_run_id,
    series_of,
)

KILLED = "killed"
"""State of a run whose journal has no end, as long as no process holds its folder."""
KIND_PREFIX = "seconds."
_IDENTITY_KEYS = ("graph", "machine", "model.name", "clip")
"""Keys whose values columns of their own show, or that follow from others."""
_MAX_SETTINGS, _MAX_CHARACTERS = 2_000, 10_000
"""Most settings of a run, and most characters of a text, that the catalogue keeps."""


class SeriesEntry(NamedTuple):
    """One series of rank 0."""

    name: str
    summary: SeriesSummary
    curve: Curve


class RunEntry(NamedTuple):
    """One run for the catalogue."""

    columns: Mapping[str, object]
    """Values by the names of the fields of `RunRow`."""
    settings: Mapping[str, Setting]
    """With the fingerprints of the inputs, as `inputs.graph`."""
    series: tuple[SeriesEntry, ...]


def read_run_entry(folder: Path) -> RunEntry:
    """Reads a run folder for the catalogue; whatever is damaged becomes a fault of the row.

    Raises:
        RecordError: the folder holds no run, or one of another format.
    """
    run_id = read_run_id(folder)
    faults: list[str] = []
    run = _read_journals(folder, faults)
    changed = changed_files(folder, run.events)
    faults += journal_faults(run_id, run.files, run.events, run.steps, changed)
    settings = _settings(folder, faults)
    annotations = read_annotations(folder)
    inputs = input_fingerprints(folder)
    columns: dict[str, object] = {
        "id": run_id,
        "folder": folder.name,
        "name": _text(run.meta.get("name")) or folder.name,
        "started": _number(run.events[0].time) if run.events else None,
        "ended": run.last_time,
        "model": _text(run.meta.get("model")) or "?",
        "machine": _text(run.meta.get("machine")) or "?",
        "host": _host(folder, faults),
        "site": _text(run.meta.get("site")),
        "group": _text(run.meta.get("group")),
        "parent": _text(describe_parent(run.meta)),
        "attempts": len(run.files),
        "ranks": run.ranks,
        "step": run.steps[-1] if run.steps else 0,
        "steps": _number(run.meta.get("steps")),
        "journal_bytes": run.bytes,
        "changes": len(annotation_files(folder)),
        **_predicted(run.meta),
        **_outcome(run.events),
        **_measured(run.series, run.first_step_of_plan),
        "archived": annotations.archived,
        "broken": annotations.broken,
        "tags": annotations.tags,
        "notes": annotations.notes,
        "faults": tuple(map(_clean, (*faults, *annotations.faults))),
        "inputs": inputs,
        "settings": settings,
    }
    return RunEntry(
        columns=columns,
        settings=settings | {f"inputs.{name}": value for name, value in inputs.items()},
        series=tuple(
            SeriesEntry(name, summary_of(one.steps, one.values), curve_of(one.steps, one.values))
            for name, one in sorted({_clean(name): one for name, one in run.series.items()}.items())
        ),
    )


class _Journals(NamedTuple):
    """What the journals of rank 0 hold, all attempts together."""

    series: Mapping[str, Series]
    events: Sequence[JournalEvent]
    meta: Mapping[str, object]
    files: Sequence[JournalFile]
    ranks: int
    bytes: int
    steps: Sequence[int]
    """Numbers of all steps, in order, each once."""
    last_time: float | None
    first_step_of_plan: int
    """The first step that ran under the current plan."""


def _read_journals(folder: Path, faults: list[str]) -> _Journals:
    files = journal_files(folder)
    own = [file for file in files if file.rank == 0]
    first_attempt = first_attempt_of_plan(folder)
    series: dict[str, Series] = {}
    events: list[JournalEvent] = []
    first_step_of_plan = journal_bytes = 0
    for file in own:
        records = _read_journal(file.path, faults)
        if records is None:
            continue
        journal_bytes += records.read_bytes
        later = series_of(records)
        if file.attempt == first_attempt and file.attempt > 1 and "seconds" in later:
            first_step_of_plan = int(later["seconds"].steps[0])
        series = continued(series, later)
        events += records.events
    metas = (event.fields for event in events if event.name == "meta")
    times = [*(event.time for event in events), *(one.times[-1] for one in series.values())]
    known_times = [calendar_time(time) for value in times if (time := _number(value)) is not None]
    return _Journals(
        series=series,
        events=events,
        meta={key: value for fields in metas for key, value in fields.items()},
        files=own,
        ranks=len({file.rank for file in files}),
        bytes=journal_bytes,
        steps=_numbers(series),
        last_time=max(known_times, default=None),
        first_step_of_plan=first_step_of_plan,
    )


def _numbers(series: Mapping[str, Series]) -> Sequence[int]:
    """The numbers of all steps of some series, in order, each once."""
    own = (one.steps for name, one in series.items() if not name.startswith(SYSTEM_PREFIX))
    # Most series share one array of steps.
    arrays = list({id(steps): steps for steps in own}.values())
    if not arrays:
        return ()
    steps = np.concatenate(arrays)
    if not (np.diff(steps) > 0).all():
        steps = np.unique(steps)
    first, last = int(steps[0]), int(steps[-1])
    return range(first, last + 1) if last - first + 1 == len(steps) else steps.tolist()


def _read_journal(path: Path, faults: list[str]) -> JournalRecords | None:
    """The records of one journal; None if none can be read."""
    name = f"{path.parent.name}/{path.name}"
    try:
        records = JournalCursor(path).read()
    except RecordError as error:
        faults.append(str(error))
        return None
    except (ValueError, KeyError, TypeError, RecursionError):
        faults.append(f"{name}: has records that no Windlass wrote, and is left out")
        return None
    if records.skipped:
        faults.append(describe_skipped(path, records.skipped))
    return records


def _measured(series: Mapping[str, Series], first_step: int) -> dict[str, object]:
    """The columns that come from series: medians under the current plan, and last values."""
    medians = {
        name: _finite(np.median(values))
        for name, one in series.items()
        if name in ("seconds", "tokens") or name.startswith(KIND_PREFIX)
        if len(values := one.values[one.steps >= first_step])
    }
    seconds, tokens = medians.get("seconds"), medians.get("tokens")
    main, memory = main_series(series), series.get("memory_bytes")
    value = None if main is None else _finite(series[main].values[-1])
    return {
        "loss": value if main == "loss" else None,
        "metric": main if main is None else _clean(main),
        "metric_value": value,
        "seconds": seconds,
        "memory_bytes": None if memory is None else _finite(memory.values.max()),
        "tokens_per_second": tokens / seconds if tokens and seconds else None,
        "kinds": {
            name.removeprefix(KIND_PREFIX): value
            for name, value in sorted(medians.items())
            if name.startswith(KIND_PREFIX) and value is not None
        },
    }


def _predicted(meta: Mapping[str, object]) -> dict[str, object]:
    """The predicted step time and the ends of its interval."""
    interval = meta.get("predicted_interval")
    ends = interval if isinstance(interval, list) and len(interval) == 2 else (None, None)
    names = ("predicted_seconds", "low_seconds", "high_seconds")
    values = (meta.get("predicted_seconds"), *ends)
    return {name: _number(value) for name, value in zip(names, values, strict=True)}


def _outcome(events: Sequence[JournalEvent]) -> dict[str, object]:
    """State, last held-out loss and last verdict."""
    keys = {"evaluation": "loss", "end": "held_out_loss"}
    losses = [_number(e.fields.get(keys[e.name])) for e in events if e.name in keys]
    verdicts = [_text(e.fields.get("level")) for e in events if e.name == "verdict"]
    openings = [index for index, event in enumerate(events) if event.name == "meta"]
    last_attempt = events[openings[-1] :] if openings else events
    states = [_text(e.fields.get("state")) for e in last_attempt if e.name == "end"]
    state = states[-1] if states else None
    return {
        "state": state if state in get_args(RunState) else KILLED,
        "held_out_loss": next((loss for loss in reversed(losses) if loss is not None), None),
        "verdict": verdicts[-1] if verdicts else None,
    }


def _settings(folder: Path, faults: list[str]) -> dict[str, Setting]:
    """What was asked for and planned, by dotted key; the plan's values win."""
    settings: dict[str, Setting] = {}
    for name in (REQUEST_FILE, PLAN_FILE, CONFIG_FILE):
        tree = _read_tree(folder / name, faults)
        if name == CONFIG_FILE:
            values = tree.get("values")
            tree = values if isinstance(values, dict) else {}
        stages = tree.pop("stages", None) if name == PLAN_FILE else None
        with contextlib.suppress(RecursionError):
            settings |= _flat(tree)
        if stages is not None:
            with contextlib.suppress(TypeError, KeyError, ValueError):
                settings["phases"] = max(len(stage["phases"]) for stage in stages)
    known = sorted(key for key in settings if key not in _IDENTITY_KEYS)
    return {key: settings[key] for key in known[:_MAX_SETTINGS]}


def _flat(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, Setting]]:
    """Dotted keys and values of nested tables; lists as JSON."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, float) and not math.isfinite(value):
            yield _clean(prefix + key), str(value)
        elif isinstance(value, bool | int | float):
            yield _clean(prefix + key), value
        elif value is not None:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            yield _clean(prefix + key), _clean(text)


def _read_tree(path: Path, faults: list[str]) -> dict[str, Any]:
    """The content of a TOML or JSON file; empty if it is missing or damaged."""
    try:
        content = read_regular_file(path).decode()
        tree = tomllib.loads(content) if path.suffix == ".toml" else json.loads(content)
    except FileNotFoundError:
        return {}
    except OSError as error:
        faults.append(f"{path.name}: {error.strerror}")
        return {}
    except (ValueError, RecursionError):
        faults.append(f"{path.name}: is damaged")
        return {}
    return tree if isinstance(tree, dict) else {}


def _host(folder: Path, faults: list[str]) -> str | None:
    return _text(_read_tree(folder / ENVIRONMENT_FILE, faults).get("host"))


def _text(value: object) -> str | None:
    return _clean(value) if isinstance(value, str) and value else None


def _clean(text: str) -> str:
    """The text as every database stores it: UTF-8, without NUL, of bounded length."""
    return text[:_MAX_CHARACTERS].encode(errors="replace").decode().replace("\0", "?")


def _number(value: object) -> float | None:
    return _finite(value) if isinstance(value, int | float) else None


def _finite(value: float) -> float | None:
    """The number; None if it is none, or beyond what a database holds."""
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
