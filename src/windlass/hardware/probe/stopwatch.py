"""Timing: how long a piece of work takes on a device, by repeating it."""

import statistics
import time
from collections.abc import Callable
from math import log

import torch

_LEAST_REPEATS = 2
_MOST_REPEATS = 40
_STALL = 2.0
"""Times the median from which on a repeat was held up by something else."""


class Stopwatch:
    """Repeats work on one device and keeps how far repeats lie apart.

    Args:
        device: where the work runs; an accelerator is waited for.
        budget_seconds: to be spent on one piece of work, once it ran twice.
    """

    def __init__(self, device: torch.device, *, budget_seconds: float) -> None:
        self.device = device
        self._budget_seconds = budget_seconds
        self._spreads: list[float] = []
        self._found: list[list[float]] = []
        self._turn = 0

    def start_second_round(self) -> None:
        """Begins a second round of the same pieces of work in the same order.

        Of each the mean of both rounds then counts: a machine that others use too is slow for
        seconds at a time, and a run meets both.
        """
        self._turn = 0

    def seconds(self, work: Callable[[], object]) -> float:
        """Seconds of one run of `work`: the mean of repeats, stalls left out.

        A step is a sum of hundreds of such pieces, each as fast as it happens to be. So the mean
        tells what it takes, and the best or a quartile would be too hopeful.
        """
        first = self._once(work)
        # What takes long has warmed itself; what is short is run once more.
        taken = [first] if first >= self._budget_seconds else []
        end = time.perf_counter() + self._budget_seconds
        while len(taken) < _LEAST_REPEATS or (
            len(taken) < _MOST_REPEATS and time.perf_counter() < end
        ):
            taken.append(self._once(work))
        if len(taken) > _LEAST_REPEATS:
            self._spreads.append(_deviation(taken))
        return self._over_rounds(_mean(taken))

    def _over_rounds(self, seconds: float) -> float:
        """The mean of this time and that of the round before, if there was one."""
        if self._turn == len(self._found):
            self._found.append([])
        rounds = self._found[self._turn]
        rounds.append(seconds)
        self._turn += 1
        return statistics.fmean(rounds)

    @property
    def noise(self) -> float:
        """Median, over all pieces of work, of the standard deviation of log(time)."""
        return statistics.median(self._spreads) if self._spreads else 0.0

    def _once(self, work: Callable[[], object]) -> float:
        if self.device.type == "cuda":
            return self._on_accelerator(work)
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    def _on_accelerator(self, work: Callable[[], object]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(self.device)
        start.record()
        work()
        end.record()
        torch.cuda.synchronize(self.device)
        return float(start.elapsed_time(end)) / 1e3


def _mean(taken: list[float]) -> float:
    """Of all that were not held up."""
    limit = _STALL * statistics.median_low(taken)
    return statistics.fmean(seconds for seconds in taken if seconds <= limit)


def _deviation(taken: list[float]) -> float:
    """Of log(time) around the median, by the median of distances: a single stall says little.

    1.4826 makes it the standard deviation where times are log-normal.
    """
    middle = log(statistics.median(taken))
    return 1.4826 * statistics.median(abs(log(seconds) - middle) for seconds in taken)
