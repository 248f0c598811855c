"""Timing: how long a piece of work takes on a device, by repeating it."""

import statistics
import time
from collections.abc import Callable
from math import log

import torch

_LEAST_REPEATS = 3
_MOST_REPEATS = 40


class Stopwatch:
    """Repeats work on one device and keeps how far repeats lie apart.

    Args:
        device: where the work runs; an accelerator is waited for.
        budget_seconds: to be spent on one piece of work, once it ran three times.
    """

    def __init__(self, device: torch.device, *, budget_seconds: float) -> None:
        self.device = device
        self._budget_seconds = budget_seconds
        self._spreads: list[float] = []
        self._best: list[float] = []
        self._turn = 0

    def again(self) -> None:
        """Begins a second round of the same pieces of work in the same order.

        Of each the shorter time then counts: a machine that others use too is slow for seconds at a
        time, but hardly twice at the same piece.
        """
        self._turn = 0

    def seconds(self, work: Callable[[], object]) -> float:
        """Seconds of one run of `work`: the lower quartile of repeats, after one not counted.

        Whatever else runs on the machine only ever adds to a time, so the lower half tells more
        about the work, and the quartile is not yet the one lucky repeat.
        """
        self._once(work)
        taken: list[float] = []
        end = time.perf_counter() + self._budget_seconds
        while len(taken) < _LEAST_REPEATS or (
            len(taken) < _MOST_REPEATS and time.perf_counter() < end
        ):
            taken.append(self._once(work))
        if len(taken) > _LEAST_REPEATS:
            self._spreads.append(_deviation(taken))
        taken.sort()
        return self._shorter(taken[len(taken) // 4])

    def _shorter(self, seconds: float) -> float:
        """This time, or the one of the round before."""
        if self._turn == len(self._best):
            self._best.append(seconds)
        self._best[self._turn] = min(seconds, self._best[self._turn])
        self._turn += 1
        return self._best[self._turn - 1]

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


def _deviation(taken: list[float]) -> float:
    """Of log(time) around the median, by the median of distances: a single stall says little.

    1.4826 makes it the standard deviation where times are log-normal.
    """
    middle = log(statistics.median(taken))
    return 1.4826 * statistics.median(abs(log(seconds) - middle) for seconds in taken)
