"""What a sweep reads from the folder of a run: how far it is, how it ended, its objectives."""

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from windlass.errors import RecordError
from windlass.schema import RunState
from windlass.sweep.search_space import Dimension
from windlass.sweep.sweep_file import SweepRequest, Trial
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


_GROUPS = 4
"""Parts into which a range is divided, of equally many trials each."""
_FEWEST = 8
"""Trials without which nothing is said."""


def best_trials(request: SweepRequest, trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """The best finished trial; with several objectives all that no other beats in each of them."""
    signs = np.array([-1.0 if large else 1.0 for _, large in request.directions()])
    done = [trial for trial in trials if trial.state == "finished" and trial.values]
    values = np.array([trial.values for trial in done]).reshape(len(done), len(signs)) * signs
    best = [
        trial
        for trial, own in zip(done, values, strict=True)
        if not any((other <= own).all() and (other < own).any() for other in values)
    ]
    return tuple(best[:1] if len(signs) == 1 else best)


def ranked_trials(request: SweepRequest, trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """The trials with a result, the best by the first objective first.

    Pruned trials come behind all finished ones, and those that came further before the others.
    """
    sign = -1.0 if request.directions()[0][1] else 1.0
    known = [t for t in trials if t.state in ("finished", "pruned") and t.values]
    return tuple(
        sorted(known, key=lambda t: (t.state, -(t.pruned_at or 0), sign * t.values[0], t.number))
    )


def importance(request: SweepRequest, trials: Sequence[Trial]) -> Mapping[str, float]:
    """The share of the spread of the first objective's ranks that each key explains, 0 to 1.

    It is `(H - k + 1) / (n - k)` of a Kruskal-Wallis test over `k` parts of the range of the key,
    or over its choices (Tomczak & Tomczak 2014, Trends in Sport Sciences 1(21)). So a learning rate
    of which the middle is best counts as well as one of which the lowest is, and a key without
    influence has about 0. Keys are looked at one by one: what two of them do only together is not
    seen.

    Args:
        trials: its trials; those with a result count, as `ranked_trials` orders them.

    Returns:
        By dotted key, the largest first; empty with fewer than 8 results.
    """
    ranked = ranked_trials(request, trials)
    if len(ranked) < _FEWEST:
        return {}
    ranks = np.arange(float(len(ranked)))
    shares = {one.key: _share(_groups(one, ranked), ranks) for one in request.dimensions()}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def _share(groups: npt.NDArray[np.int64], ranks: npt.NDArray[np.float64]) -> float:
    """The share of the spread of the ranks that lies between groups, beyond what chance gives."""
    names, counts = np.unique(groups, return_counts=True)
    count, parts = len(ranks), len(names)
    spread = float(((ranks - ranks.mean()) ** 2).sum())
    if parts < 2 or parts >= count or not spread:
        return 0.0
    means = np.array([ranks[groups == name].mean() for name in names])
    between = float((counts * (means - ranks.mean()) ** 2).sum())
    statistic = (count - 1) * between / spread
    return float(np.clip((statistic - parts + 1) / (count - parts), 0.0, 1.0))


def _groups(dimension: Dimension, trials: Sequence[Trial]) -> npt.NDArray[np.int64]:
    """Part of the range, or position of the choice, of each trial."""
    places = np.array([dimension.position(trial.params[dimension.key]) for trial in trials])
    known = np.unique(places)
    if len(known) <= _GROUPS or dimension.kind == "choice":
        return np.searchsorted(known, places)
    edges = np.quantile(places, np.linspace(0, 1, _GROUPS + 1)[1:-1])
    return np.searchsorted(edges, places, side="left")
