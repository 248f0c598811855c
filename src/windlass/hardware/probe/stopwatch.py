"""Times pieces of work on a device by repeating them."""

import statistics
import time
from collections.abc import Callable
from math import log

import torch

_MIN_REPEATS = 2
_MAX_REPEATS = 40
_STALL_FACTOR = 2.0
"""A repeat that takes more than this many medians was stalled by another process."""


class Stopwatch:
    """Times work on one device by repeating it, and keeps the spread of the repeats.

    Args:
        device: where the work runs; timing waits until an accelerator has finished.
        budget_seconds: time to spend on one piece of work after two runs of it.
    """

    def __init__(self, device: torch.device, *, budget_seconds: float) -> None:
        self.device = device
        self._budget_seconds = budget_seconds
        self._spreads: list[float] = []
        self._rounds: list[list[float]] = []
        self._index = 0

    def start_second_round(self) -> None:
        """Starts a second round of the same pieces of work in the same order.

        From then on `seconds` returns the mean over both rounds. A machine that others use too is
        slow for seconds at a time, and a training run meets slow and fast times alike.
        """
        self._index = 0

    def seconds(self, work: Callable[[], object]) -> float:
        """Seconds of one run of `work`: the mean of its repeats without stalled ones.

        A step is a sum of hundreds of such pieces, some fast and some slow, so their mean predicts
        it. The best time or a quartile would predict too short a step.
        """
        first = self._once(work)
        # A long run warms up within itself; a short one is not counted the first time.
        times = [first] if first >= self._budget_seconds else []
        end = time.perf_counter() + self._budget_seconds
        while len(times) < _MIN_REPEATS or (
            len(times) < _MAX_REPEATS and time.perf_counter() < end
        ):
            times.append(self._once(work))
        if len(times) > _MIN_REPEATS:
            self._spreads.append(_deviation(times))
        return self._mean_over_rounds(_mean(times))

    def _mean_over_rounds(self, seconds: float) -> float:
        """Mean of this time and the one that the round before measured, if there was one."""
        if self._index == len(self._rounds):
            self._rounds.append([])
        times = self._rounds[self._index]
        times.append(seconds)
        self._index += 1
        return statistics.fmean(times)

    @property
    def noise(self) -> float:
        """Standard deviation of log(time) between repeats: the median over all pieces of work."""
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


def _mean(times: list[float]) -> float:
    """Mean of the repeats that were not stalled."""
    limit = _STALL_FACTOR * statistics.median_low(times)
    return statistics.fmean(seconds for seconds in times if seconds <= limit)


def _deviation(times: list[float]) -> float:
    """Standard deviation of log(time), from the median absolute deviation.

    A single stall hardly moves it. The factor 1.4826 makes it the standard deviation of log-normal
    times.
    """
    middle = log(statistics.median(times))
    return 1.4826 * statistics.median(abs(log(seconds) - middle) for seconds in times)
