"""Which waiting trials may start now: as many as cores and memory hold."""

from collections.abc import Sequence
from dataclasses import dataclass

from windlass.sweep.sweep_file import Trial


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

    Args:
        waiting: trials that could start, with their predictions, in order.
        room: what the machine has.
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
        cores: cores of this machine, which the jobs share.
        trials: number of trials.
        needed_bytes: predicted peak memory of one trial.
    """
    fits = max(1, min(cores, trials, capacity_bytes // max(1, needed_bytes)))
    return max(jobs for jobs in range(1, fits + 1) if cores % jobs == 0)
