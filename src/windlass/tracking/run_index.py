"""Lists runs and finds one by its name; reads only the beginnings and ends of journals."""

import contextlib
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args

from windlass.errors import RecordError, did_you_mean
from windlass.schema import PLAN_FILE, REQUEST_FILE, RunState
from windlass.tracking.folder_lock import is_locked
from windlass.tracking.journal import Journal, JournalEvent
from windlass.tracking.journal_reader import read_head_and_tail
from windlass.tracking.run_folder import (
    ID_FILE,
    LOCK_FILE,
    RUN_FORMAT,
    SHORT_ID_DIGITS,
    journal_files,
    read_run_format,
    read_run_id,
)

LAST = "last"
"""Names the newest run."""
_MAX_NAMES = 5
_IDENTITY_KEYS = ("graph", "machine", "model.name", "clip")
"""Keys whose values columns of their own show, or that follow from others."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunSummary:
    """One line of a list of runs."""

    id: str
    folder: Path
    state: RunState
    model: str
    machine: str
    started: float
    """Seconds since 1970; NaN if the journal has no event."""
    step: int
    """The last step in the journal; 0 before the first."""
    steps: int | None
    """Requested number of steps; None if the journal does not have it."""
    loss: float
    """Training loss of the last step in nats a token; NaN before the first."""
    held_out_loss: float | None
    seconds: float
    """Median step time of the steps that were read; NaN before the first."""
    predicted_seconds: float | None
    predicted_interval: tuple[float, float] | None
    """Ends of the 80 % interval of the prediction; None if the journal does not have them."""
    attempts: int
    parent: str | None = None
    """The run that this one started from, `<end of id>@<step>`; None if it has none."""

    def __repr__(self) -> str:
        steps = f" of {self.steps}" if self.steps else ""
        loss = f", loss {self.loss:.4f}" if self.step else ""
        return f"<Run {self.short_id} of {self.model}: {self.state}, step {self.step}{steps}{loss}>"

    @property
    def outside_interval(self) -> bool:
        """Whether the median step time lies outside the predicted interval."""
        if self.predicted_interval is None or math.isnan(self.seconds):
            return False
        low, high = self.predicted_interval
        return not low <= self.seconds <= high

    @property
    def short_id(self) -> str:
        """The last digits of the id, as in the folder's name."""
        return self.id[-SHORT_ID_DIGITS:]

    def settings(self) -> dict[str, str]:
        """What was asked for and planned, by dotted key; what cannot be read is left out."""
        settings: dict[str, str] = {}
        for name in (PLAN_FILE, REQUEST_FILE):
            with contextlib.suppress(OSError, ValueError, RecursionError):
                tree = tomllib.loads((self.folder / name).read_text(encoding="utf-8"))
                phases = [len(stage["phases"]) for stage in tree.pop("stages", [])]
                found = dict(_flat(tree)) | ({"phases": str(max(phases))} if phases else {})
                settings = found | settings
        return {key: value for key, value in settings.items() if key not in _IDENTITY_KEYS}


def _flat(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys and values of nested tables; lists as TOML writes them."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, str(value).replace("True", "true").replace("False", "false")


def list_runs(root: Path) -> tuple[RunSummary, ...]:
    """All runs under `root`, newest first; folders without a readable run are left out."""
    summaries = [
        summary for folder in _folders(root) if (summary := summarise_run(folder)) is not None
    ]
    return tuple(sorted(summaries, key=lambda run: run.id, reverse=True))


def describe_other_formats(root: Path) -> str | None:
    """One sentence on the runs under `root` that have another format; None if there are none."""
    formats = {folder: read_run_format(folder) for folder in _folders(root)}
    others = sorted(folder.name for folder, number in formats.items() if number != RUN_FORMAT)
    if not others:
        return None
    names = ", ".join(f"`{name}`" for name in others[:_MAX_NAMES])
    names += f" and {len(others) - _MAX_NAMES} more" if len(others) > _MAX_NAMES else ""
    count = "1 run" if len(others) == 1 else f"{len(others)} runs"
    return (
        f"another version of Windlass wrote {count} in `{root}` (this one reads format "
        f"{RUN_FORMAT}): {names}; read them with that version"
    )


def find_run(root: Path, query: str) -> Path:
    """The run folder that `query` names.

    Args:
        root: the folder that holds the runs.
        query: a path, a folder's name, the beginning of an id or of its short end, or `last`.

    Raises:
        RecordError: no run matches, more than one does, or the one that does has another format.
    """
    if "/" in query or query in (".", ".."):
        read_run_id(Path(query))
        return Path(query)
    folders = tuple(_folders(root))
    ids = {folder: read_run_id(folder) for folder in folders if _is_readable(folder)}
    if query == LAST and ids:
        return max(ids, key=lambda folder: ids[folder])
    exact = [folder for folder in ids if query in (folder.name, ids[folder])]
    matches = exact or [folder for folder in ids if _matches(query, folder.name, ids[folder])]
    if len(matches) == 1:
        return matches[0]
    if not matches and (Path(query) / ID_FILE).is_file():
        return Path(query)
    if not matches:
        raise _no_match(root, query, folders, ids)
    names = ", ".join(f"`{folder.name}`" for folder in sorted(matches)[-_MAX_NAMES:])
    raise RecordError(f"`{query}` means {len(matches)} runs: {names}; write more of the name")


def run_state(folder: Path, journals: Sequence[Journal]) -> RunState:
    """The state of a run, from its lock and the last event of its last attempt."""
    if is_locked(folder / LOCK_FILE):
        return "running"
    end = journals[-1].end if journals else None
    state = end.fields.get("state") if end else None
    return cast(RunState, state) if state in get_args(RunState) else "killed"


def summarise_run(folder: Path) -> RunSummary | None:
    """Summary of one run; None if the folder holds no readable one."""
    try:
        run_id = read_run_id(folder)
        attempts = [file for file in journal_files(folder) if file.rank == 0]
        journals = [read_head_and_tail(file.path) for file in attempts]
    except RecordError:
        return None
    meta = {key: value for journal in journals for key, value in journal.meta.items()}
    rows = [row for journal in journals for row in journal.rows]
    events = [event for journal in journals for event in journal.events]
    seconds = sorted(row.values.get("seconds", math.nan) for row in rows)
    return RunSummary(
        id=run_id,
        folder=folder,
        state=run_state(folder, journals),
        model=str(meta.get("model", "?")),
        machine=str(meta.get("machine", "?")),
        started=events[0].time if events else math.nan,
        step=rows[-1].step if rows else 0,
        steps=meta.get("steps"),
        loss=rows[-1].values.get("loss", math.nan) if rows else math.nan,
        held_out_loss=_held_out(events),
        seconds=seconds[len(seconds) // 2] if seconds else math.nan,
        predicted_seconds=meta.get("predicted_seconds"),
        predicted_interval=_interval(meta.get("predicted_interval")),
        attempts=len(attempts),
        parent=describe_parent(meta),
    )


def describe_parent(meta: Mapping[str, object]) -> str | None:
    """The run that another one started from, `<end of id>@<step>`; None if it has none.

    Args:
        meta: the opening event of the other run.
    """
    parent = meta.get("parent")
    if not isinstance(parent, Mapping):
        return None
    return f"{str(parent.get('id', '?'))[-SHORT_ID_DIGITS:]}@{parent.get('step', '?')}"


def _interval(ends: object) -> tuple[float, float] | None:
    """Both ends of an interval; None if it is none."""
    if not isinstance(ends, list) or len(ends) != 2:
        return None
    low, high = ends
    numbers = isinstance(low, int | float) and isinstance(high, int | float)
    return (float(low), float(high)) if numbers else None


def _held_out(events: Sequence[JournalEvent]) -> float | None:
    """The last held-out loss among the events: of an evaluation, or repeated by an end event."""
    keys = {"evaluation": "loss", "end": "held_out_loss"}
    losses = [event.fields.get(keys[event.name]) for event in events if event.name in keys]
    return next((loss for loss in reversed(losses) if loss is not None), None)


def _no_match(
    root: Path, query: str, folders: Sequence[Path], ids: Mapping[Path, str]
) -> RecordError:
    """What is wrong where no readable run matches; a run of another format may do so."""
    for folder in folders:
        if folder not in ids and (folder.name.startswith(query) or folder.name.endswith(query)):
            try:
                read_run_id(folder)
            except RecordError as error:
                return error
    if not ids:
        others = describe_other_formats(root)
        more = f" ({others})" if others else ""
        return RecordError(f"no run in `{root}`{more}; start one with `windlass train`")
    names = [name for folder in ids for name in (folder.name, ids[folder][-SHORT_ID_DIGITS:])]
    return RecordError(f"no run `{query}` in `{root}`{did_you_mean(query, (LAST, *names))}")


def _is_readable(folder: Path) -> bool:
    return read_run_format(folder) == RUN_FORMAT


def _folders(root: Path) -> Iterator[Path]:
    if root.exists() and not root.is_dir():
        raise RecordError(f"`{root}` is no folder of runs")
    if root.is_dir():
        yield from (folder for folder in root.iterdir() if (folder / ID_FILE).is_file())


def _matches(query: str, name: str, run_id: str) -> bool:
    short = run_id[-SHORT_ID_DIGITS:]
    return run_id.startswith(query) or short.startswith(query) or name.startswith(query)
