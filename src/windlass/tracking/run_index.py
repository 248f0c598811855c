"""Which runs there are, and which one a text means; reads the ends of journals only."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args

from windlass.errors import RecordError, did_you_mean
from windlass.schema.run_record import RunState
from windlass.tracking.folder_lock import is_locked
from windlass.tracking.journal import Journal, JournalEvent, read_head_and_tail
from windlass.tracking.run_folder import (
    ID_FILE,
    LOCK_FILE,
    SHORT_DIGITS,
    journal_files,
    journal_path,
    read_run_id,
)

LAST = "last"
"""What means the newest run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """One line of a list of runs."""

    id: str
    folder: Path
    state: RunState
    model: str
    machine: str
    started: float
    """Seconds since 1970; NaN if the journal does not say."""
    step: int
    """The last one journalled; 0 before the first."""
    steps: int | None
    """How many were asked for; None if the journal does not say."""
    loss: float
    """Of the last step, nats a token; NaN before the first."""
    held_out_loss: float | None
    seconds: float
    """Median of the steps at hand; NaN before the first."""
    predicted_seconds: float | None
    attempts: int

    @property
    def short_id(self) -> str:
        """The end of the id, as in the folder's name."""
        return self.id[-SHORT_DIGITS:]


def list_runs(root: Path) -> tuple[RunSummary, ...]:
    """All runs under `root`, newest first; folders that hold no readable run are left out."""
    found = [summary for folder in _folders(root) if (summary := summarise_run(folder)) is not None]
    return tuple(sorted(found, key=lambda run: run.id, reverse=True))


def find_run(root: Path, query: str) -> Path:
    """The run folder that `text` means.

    Args:
        root: where runs lie.
        text: a path, a folder's name, the beginning of an id or of its short end, or `last`.

    Raises:
        RecordError: no run, or more than one.
    """
    if "/" in query or query in (".", ".."):
        read_run_id(Path(query))
        return Path(query)
    ids = {folder: read_run_id(folder) for folder in _folders(root)}
    if query == LAST and ids:
        return max(ids, key=lambda folder: ids[folder])
    exact = [folder for folder in ids if query in (folder.name, ids[folder])]
    near = exact or [folder for folder in ids if _means(query, folder.name, ids[folder])]
    if len(near) == 1:
        return near[0]
    if not near and (Path(query) / ID_FILE).is_file():
        return Path(query)
    if not ids:
        raise RecordError(f"no run in `{root}`; begin one with `windlass train`")
    if not near:
        known = [name for folder in ids for name in (folder.name, ids[folder][-SHORT_DIGITS:])]
        raise RecordError(f"no run `{query}` in `{root}`{did_you_mean(query, (LAST, *known))}")
    names = ", ".join(f"`{folder.name}`" for folder in sorted(near)[-5:])
    raise RecordError(f"`{query}` means {len(near)} runs: {names}; write more of the name")


def run_state(folder: Path, journals: Sequence[Journal]) -> RunState:
    """What a run is doing, told from the lock and from the end of its last attempt."""
    if is_locked(folder / LOCK_FILE):
        return "running"
    end = journals[-1].end if journals else None
    state = end.fields.get("state") if end else None
    return cast(RunState, state) if state in get_args(RunState) else "killed"


def summarise_run(folder: Path) -> RunSummary | None:
    """One line on one run; None if the folder holds no readable one."""
    try:
        run_id = read_run_id(folder)
        attempts = [attempt for rank, attempt in journal_files(folder) if rank == 0]
        journals = [read_head_and_tail(journal_path(folder, 0, attempt)) for attempt in attempts]
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
        attempts=len(attempts),
    )


def _held_out(events: Sequence[JournalEvent]) -> float | None:
    """The last held-out loss at hand: of an evaluation, or what an end remembers of one."""
    keys = {"evaluation": "loss", "end": "held_out_loss"}
    losses = [event.fields.get(keys[event.name]) for event in events if event.name in keys]
    return next((loss for loss in reversed(losses) if loss is not None), None)


def _folders(root: Path) -> Iterator[Path]:
    if root.is_dir():
        yield from (folder for folder in root.iterdir() if (folder / ID_FILE).is_file())


def _means(text: str, name: str, run_id: str) -> bool:
    short = run_id[-SHORT_DIGITS:]
    return run_id.startswith(text) or short.startswith(text) or name.startswith(text)
