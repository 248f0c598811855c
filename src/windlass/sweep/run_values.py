"""What a sweep reads from the folder of a run: how far it is, how it ended, its objectives."""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from windlass.errors import RecordError
from windlass.schema import RunState
from windlass.tracking import JournalEvent, journal_files, read_journal, read_series

HELD_OUT = "held_out_loss"
_MEAN_STEPS = 10
"""The loss of a step is the median over so many steps up to it, as one step is noisy."""
_WARM_UP_STEPS = 2
"""First steps of an attempt, whose time says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunValues:
    """The series of one run that a sweep compares."""

    step: int = 0
    """The last step on record."""
    memory_bytes: int = 0
    """Measured peak memory of the fullest device."""
    steps: tuple[npt.NDArray[np.int64], ...] = ()
    """`Int[row]` for each objective."""
    values: tuple[npt.NDArray[np.float64], ...] = ()
    """`Float[row]` for each objective."""
    names: tuple[str, ...] = ()

    def at(self, step: int, objective: int = 0) -> float:
        """The value of an objective at a step; NaN if nothing was recorded up to then."""
        if not self.names:
            return math.nan
        values = self.values[objective][self.steps[objective] <= step]
        if not len(values):
            return math.nan
        if self.names[objective] == HELD_OUT:
            return float(values[-1])
        if self.names[objective] == "seconds":
            return float(np.median(values[_WARM_UP_STEPS:] if len(values) > 5 else values))
        return float(np.median(values[-_MEAN_STEPS:]))

    def last(self) -> tuple[float, ...]:
        """All objectives at the last step."""
        return tuple(self.at(self.step, index) for index in range(len(self.names)))


def read_run_values(folder: Path, objectives: Sequence[str]) -> RunValues:
    """The objectives of a run so far, whether it goes on or not; empty if it has no step.

    Args:
        folder: the run folder, which need not exist yet.
        objectives: names of series, or `held_out_loss`.
    """
    series = read_series(folder)
    if "loss" not in series:
        return RunValues()
    memory = series.get("memory_bytes")
    columns = []
    for name in objectives:
        if name == HELD_OUT:
            found = {int(e.fields["step"]): float(e.fields["loss"]) for e in _evaluations(folder)}
            columns.append((np.array(sorted(found)), np.array([found[s] for s in sorted(found)])))
        elif name in series:
            columns.append((series[name].steps, series[name].values))
        else:
            columns.append((np.zeros(0, dtype=np.int64), np.zeros(0)))
    return RunValues(
        step=int(series["loss"].steps[-1]),
        memory_bytes=0 if memory is None else int(memory.values.max()),
        steps=tuple(steps for steps, _ in columns),
        values=tuple(values for _, values in columns),
        names=tuple(objectives),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """How the last attempt at a run ended."""

    state: RunState
    """`killed` if its journal does not say."""
    reason: str = ""


def read_run_end(folder: Path) -> RunEnd:
    """How a run that no process holds has ended."""
    events = _events(folder)
    starts = [index for index, event in enumerate(events) if event.name == "meta"]
    last = events[starts[-1] :] if starts else []
    end = next((event for event in reversed(last) if event.name == "end"), None)
    if end is None:
        return RunEnd(state="killed")
    return RunEnd(state=end.fields.get("state", "killed"), reason=end.fields.get("reason", ""))


def _evaluations(folder: Path) -> list[JournalEvent]:
    return [e for e in _events(folder) if e.name == "evaluation" and "loss" in e.fields]


def _events(folder: Path) -> list[JournalEvent]:
    """The events of rank 0, of all attempts in order."""
    events: list[JournalEvent] = []
    for file in journal_files(folder):
        if file.rank == 0:
            with contextlib.suppress(RecordError):
                events += read_journal(file.path).events
    return events
