"""Drives a sweep: asks for trials, starts them, watches their records, prunes them, to the end.

All that it knows is in files: those of the sweep and those of the runs. So it may be killed at any
moment; the next driver takes over what runs, and goes on.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from windlass.errors import RunInterrupted, WindlassError
from windlass.sweep.jobs import Jobs
from windlass.sweep.run_values import RunValues, read_run_end, read_run_values
from windlass.sweep.sampler import TrialCurve, decide, next_point, rungs
from windlass.sweep.sweep_file import SweepFolder, SweepRequest, Trial
from windlass.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What the machine has for trials."""

    jobs: int
    """Most trials at a time."""
    capacity_bytes: int
    """Memory that all trials may have together."""
    free_bytes: int
    """Memory that nobody has now, as the system says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningTrial:
    """The memory of a trial that runs."""

    expected_bytes: int
    """The predicted peak, or the measured one if that is larger."""
    used_bytes: int
    """What its processes have now."""


def startable(
    waiting: Sequence[Trial], running: Sequence[RunningTrial], room: Room
) -> tuple[Trial, ...]:
    """The trials to start now, so that all reach their predicted peaks within the memory.

    One that does not fit now lets those behind it pass.
    """
    expected = sum(trial.expected_bytes for trial in running)
    still_to_come = sum(max(0, trial.expected_bytes - trial.used_bytes) for trial in running)
    left = min(room.capacity_bytes - expected, room.free_bytes - still_to_come)
    jobs = room.jobs - len(running)
    chosen: list[Trial] = []
    for trial in waiting:
        need = trial.predicted_bytes or 0
        if len(chosen) < jobs and need <= left:
            chosen.append(trial)
            left -= need
    return tuple(chosen)


def most_jobs(cores: int, trials: int, *, needed_bytes: int, capacity_bytes: int) -> int:
    """How many equal trials run at a time: a divisor of the cores, as many as memory holds.

    Args:
        needed_bytes: predicted peak memory of one trial.
    """
    fits = max(1, min(cores, trials, capacity_bytes // max(1, needed_bytes)))
    return max(jobs for jobs in range(1, fits + 1) if cores % jobs == 0)


_POLL_SECONDS, _READ_SECONDS = 0.1, 0.2
"""From one look at the processes to the next, and at least at the records of their runs."""
_READ_SHARE = 0.05
"""Most of the time that is spent on reading records of runs that go on."""
_MOST_DEATHS = 3
"""Killed processes after which a trial fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workplace:
    """Where the trials of a sweep run."""

    jobs: Jobs
    most_jobs: int
    """Most trials at a time."""
    capacity_bytes: int | None
    """Memory of this machine for all trials together; None if they run elsewhere."""
    predict: Callable[[Trial], Trial]
    """The trial with its predicted time and memory; raises a `WindlassError` if it cannot run."""
    command: Callable[[Trial], Sequence[str]]
    """The command line of a trial's process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepStatus:
    """How far a sweep is."""

    request: SweepRequest
    trials: tuple[Trial, ...]
    """All trials that were asked for, by number."""
    values: dict[int, RunValues]
    """What is on record of the trials that run."""


class Driver:
    """Runs a sweep to its end.

    Args:
        folder: the sweep's files; the caller holds the driver's lock.
        stop: polled; True lets all trials save and end.
        observe: called with how far the sweep is, whenever that changes.
    """

    def __init__(
        self,
        folder: SweepFolder,
        request: SweepRequest,
        workplace: Workplace,
        *,
        stop: Callable[[], bool],
        observe: Callable[[SweepStatus], None],
    ) -> None:
        self._folder, self._request, self._workplace = folder, request, workplace
        self._stop, self._observe = stop, observe
        self._names = [name for name, _ in request.directions()]
        self._sign = -1.0 if request.directions()[0][1] else 1.0
        self._trials = folder.trials()
        self._values: dict[int, RunValues] = {}
        self._curves = {number: TrialCurve() for number in self._trials}
        self._stopped: set[int] = set()
        self._seen: set[int] = set()
        self._next_read = 0.0

    def run(self) -> tuple[Trial, ...]:
        """Runs all trials, and returns them.

        Raises:
            RunInterrupted: `stop` returned True; nothing runs any more.
        """
        for trial in self._trials.values():
            self._read(trial)
        while not self._is_over():
            if self._stop():
                self._stop_all()
            self._watch()
            self._prune()
            changed = self._start() or self._ask()
            self._report()
            if not changed:
                time.sleep(_POLL_SECONDS)
        self._report()
        return tuple(self._trials.values())

    def _is_over(self) -> bool:
        done = all(trial.is_done for trial in self._trials.values())
        return done and len(self._trials) >= self._request.total

    def _in(self, *states: str) -> list[Trial]:
        return [trial for trial in self._trials.values() if trial.state in states]

    def _save(self, trial: Trial, **changes: object) -> Trial:
        """Writes a trial with some changes."""
        changed = trial.model_copy(update=changes)
        self._folder.save(changed)
        self._trials[trial.number] = changed
        return changed

    # Processes

    def _watch(self) -> None:
        """Reads what running trials have recorded, and settles those that have ended."""
        began = time.monotonic()
        is_time = began >= self._next_read
        for trial in self._in("running"):
            is_alive = self._workplace.jobs.is_alive(trial)
            if is_alive:
                self._seen.add(trial.number)
            if is_time or not is_alive:
                self._read(trial)
            if not is_alive:
                self._settle(trial)
        if is_time:
            now = time.monotonic()
            self._next_read = now + max(_READ_SECONDS, (now - began) / _READ_SHARE)

    def _read(self, trial: Trial) -> None:
        """Takes over what the run of a trial has recorded, and its values at the rungs."""
        values = read_run_values(self._folder.run_folder(trial), self._names)
        self._values[trial.number] = values
        curve = self._curves.setdefault(trial.number, TrialCurve())
        curve.values = {
            rung: self._sign * values.at(rung)
            for rung in rungs(self._request, trial.steps or values.step)
            if rung <= values.step
        }
        curve.has_ended = trial.is_done
        curve.pruned_at = trial.pruned_at

    def _settle(self, trial: Trial) -> None:
        """Notes what became of a trial whose process has ended."""
        values = self._values[trial.number]
        end = read_run_end(self._folder.run_folder(trial))
        error = self._folder.error(trial.number)
        was_seen = trial.number in self._seen
        self._stopped.discard(trial.number)
        self._seen.discard(trial.number)
        if trial.pruned_at is not None:
            self._note_pruned(trial)
        elif end.state == "finished":
            self._note_finished(trial, values)
        elif error is not None or end.state == "broken":
            self._save(trial, state="failed", reason=error or end.reason)
        elif end.state == "interrupted" or not was_seen:
            # A driver may have been killed before the process that it started took its lock; that
            # process then finds that it was started again, and ends.
            self._save(trial, state="waiting")
        elif trial.deaths + 1 >= _MOST_DEATHS:
            reason = f"its process was killed {_MOST_DEATHS} times, last after step {values.step}"
            self._save(trial, state="failed", deaths=trial.deaths + 1, reason=reason)
        else:
            self._save(trial, state="waiting", deaths=trial.deaths + 1)
        self._curves[trial.number].has_ended = self._trials[trial.number].is_done

    def _note_finished(self, trial: Trial, values: RunValues) -> None:
        last = values.last()
        missing = [name for name, value in zip(self._names, last, strict=True) if value != value]
        if missing:
            reason = f"it has recorded no finite `{missing[0]}`"
            self._save(trial, state="failed", reason=reason)
        else:
            self._save(trial, state="finished", values=last)

    def _note_pruned(self, trial: Trial) -> None:
        rung = trial.pruned_at or 0
        value = self._values[trial.number].at(rung)
        values = () if value != value else (value,)
        reason = f"worse than others at step {rung}"
        self._save(trial, state="pruned", values=values, reason=reason)

    def _stop_all(self) -> None:
        """Lets all running trials save and end."""
        while running := self._in("running"):
            for trial in running:
                if self._workplace.jobs.is_alive(trial):
                    self._stop_once(trial)
            self._watch()
            self._report()
            time.sleep(_POLL_SECONDS)
        done = len(self._in("finished", "pruned", "failed"))
        raise RunInterrupted(
            f"sweep `{self._request.name}` stopped after {done} of {self._request.total} trials; "
            f"continue with `windlass sweep {self._folder.request_file}`"
        )

    def _stop_once(self, trial: Trial) -> None:
        if trial.number not in self._stopped:
            self._stopped.add(trial.number)
            self._workplace.jobs.stop(trial)

    # Decisions

    def _prune(self) -> None:
        """Stops the trials that are not worth their remaining steps."""
        if self._request.pruner == "none" or not self._trials:
            return
        numbers = range(max(self._trials) + 1)
        decide(self._request, [self._curves.get(n, TrialCurve(has_ended=True)) for n in numbers])
        for number, curve in self._curves.items():
            trial = self._trials[number]
            if curve.pruned_at is None or trial.state in ("pruned", "failed"):
                continue
            if trial.pruned_at is None:
                trial = self._save(trial, pruned_at=curve.pruned_at)
            if trial.state == "running":
                self._stop_once(trial)
            else:  # it had ended before the trials that it is compared with came as far
                self._note_pruned(trial)
                curve.has_ended = True

    def _start(self) -> bool:
        """Starts the trials that there is room for; returns whether there were any."""
        waiting = self._in("waiting")
        if not waiting or len(self._in("running")) >= self._workplace.most_jobs:
            return False
        if self._request.pruner == "none":
            # Longest first, so that none of them is left over at the end (Graham 1969, SIAM J.
            # Appl. Math. 17(2)). A pruner compares with smaller numbers, and wants these first.
            waiting.sort(key=lambda trial: (-(trial.predicted_seconds or 0.0), trial.number))
        started = startable(waiting, list(self._running()), self._room())
        for trial in started:
            starting = self._save(trial, state="running", starts=trial.starts + 1)
            job = self._workplace.jobs.start(starting, self._workplace.command(starting))
            self._seen.add(trial.number)
            if job is not None:
                self._save(starting, job=job)
        return bool(started)

    def _running(self) -> Iterator[RunningTrial]:
        for trial in self._in("running"):
            values = self._values.get(trial.number, RunValues())
            yield RunningTrial(
                expected_bytes=max(trial.predicted_bytes or 0, values.memory_bytes),
                used_bytes=self._workplace.jobs.used_bytes(trial),
            )

    def _room(self) -> Room:
        capacity = self._workplace.capacity_bytes
        return Room(
            jobs=self._workplace.most_jobs,
            capacity_bytes=2**63 if capacity is None else capacity,
            free_bytes=2**63 if capacity is None else psutil.virtual_memory().available,
        )

    def _ask(self) -> bool:
        """Asks for one more trial, if one is wanted now; returns whether it was."""
        number = next(n for n in itertools.count() if n not in self._trials)
        if number >= self._request.total or len(self._in("waiting")) >= self._ahead():
            return False
        point = next_point(self._request, self._trials.values(), number)
        trial = Trial(number=number, params=point, run=f"{self._request.name}-{number:04}")
        try:
            trial = self._workplace.predict(trial)
            capacity = self._workplace.capacity_bytes
            if capacity is not None and (trial.predicted_bytes or 0) > capacity:
                reason = (
                    f"it needs {format_bytes(trial.predicted_bytes or 0)} (predicted), and this "
                    f"machine has {format_bytes(capacity)}"
                )
                trial = trial.model_copy(update={"state": "failed", "reason": reason})
        except WindlassError as error:
            trial = trial.model_copy(update={"state": "failed", "reason": str(error)})
        self._save(trial)
        self._curves[number] = TrialCurve(has_ended=trial.is_done)
        return True

    def _ahead(self) -> int:
        """Number of trials that may wait for room.

        A search that learns asks late. One that does not knows all, to start the longest first.
        """
        idle = self._workplace.most_jobs - len(self._in("running"))
        if self._request.sampler == "tpe":
            return self._workplace.most_jobs if idle else 1
        return self._request.total if self._request.pruner == "none" else 2 * idle + 1

    def _report(self) -> None:
        trials = tuple(self._trials[number] for number in sorted(self._trials))
        running = {trial.number for trial in self._in("running")}
        values = {number: self._values[number] for number in running & self._values.keys()}
        self._observe(SweepStatus(request=self._request, trials=trials, values=values))


def read_trials(root: Path, name: str) -> tuple[SweepRequest, tuple[Trial, ...]]:
    """What a sweep searches, and its trials by number, whether it goes on or not.

    Raises:
        RecordError: there is no such sweep.
        InputErrors: a file is damaged.
    """
    folder = SweepFolder(root, name)
    return folder.request(), tuple(folder.trials().values())
