"""Times pieces of work on a device by repeating them."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from math import ceil, log

import torch

from windlass.torch_ext import Device, device_for

BUDGET_SECONDS = 0.015
"""Time budget of one measurement; there are about 200 in each of two rounds."""
_MIN_REPEATS = 2
_MAX_REPEATS = 40
_STALL_FACTOR = 2.0
"""A repeat that takes more than this many medians was stalled by another process."""
_MOST_WAITING = 0.03
"""Share of a repeat that its threads may wait for a core; above that another process disturbed it
and it counts only if all were disturbed."""
_LEAST_SECONDS, _MOST_INNER = 5e-4, 100
"""Short work is repeated back to back for so long, as ops of a step follow each other: a thread
that sleeps in between takes 20 to 40 us to wake."""
_MOST_BUDGETS = 12
"""Budgets that a piece of work takes at most while others disturb it."""


class Stopwatch:
    """Times work on one device by repeating it, and keeps the spread of the repeats.

    Args:
        device: where the work runs; timing waits until an accelerator has finished.
        budget_seconds: time to spend on one piece of work after two runs of it.
        waiting_share: share of the time since its last call that this process waited for a core;
            None if nobody measures it.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        budget_seconds: float,
        waiting_share: Callable[[], float | None] | None = None,
    ) -> None:
        self.device = device
        computes = device_for(device)
        self._accelerator = computes if computes.is_asynchronous else None
        self._budget_seconds = budget_seconds
        self._waiting_share = waiting_share
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
        first, quiet = self._once(work, 1)
        inner = max(1, min(_MOST_INNER, ceil(_LEAST_SECONDS / max(first, 1e-9))))
        # A long run warms up within itself; a short one is not counted the first time.
        long = first >= self._budget_seconds
        times = {True: [first] if long and quiet else [], False: [first] if long else []}
        start = time.perf_counter()
        while not self._is_enough(times, time.perf_counter() - start):
            seconds, quiet = self._once(work, inner)
            times[quiet].append(seconds)
        counted = times[True] or times[False]
        if len(counted) > _MIN_REPEATS:
            self._spreads.append(_deviation(counted))
        return self._mean_over_rounds(_mean(counted))

    def _is_enough(self, times: Mapping[bool, Sequence[float]], passed: float) -> bool:
        """Whether the repeats, quiet and disturbed ones, suffice after so many seconds."""
        quiet, total = len(times[True]), len(times[True]) + len(times[False])
        if total >= _MIN_REPEATS and passed > _MOST_BUDGETS * self._budget_seconds:
            return True
        return quiet >= _MIN_REPEATS and (quiet >= _MAX_REPEATS or passed >= self._budget_seconds)

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

    def _once(self, work: Callable[[], object], inner: int) -> tuple[float, bool]:
        """Mean seconds of `inner` runs, and whether no other process disturbed them."""
        if self._accelerator is not None:
            return self._on_accelerator(work, self._accelerator, inner), True
        if self._waiting_share is not None:
            self._waiting_share()
        start = time.perf_counter()
        for _ in range(inner):
            work()
        seconds = (time.perf_counter() - start) / inner
        share = self._waiting_share() if self._waiting_share is not None else None
        return seconds, share is None or share <= _MOST_WAITING

    @staticmethod
    def _on_accelerator(work: Callable[[], object], device: Device, inner: int) -> float:
        start, end = device.new_event(timing=True), device.new_event(timing=True)
        stream = device.current_stream()
        device.synchronize()
        start.record(stream)
        for _ in range(inner):
            work()
        end.record(stream)
        device.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / inner


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


ProbeProgress = Callable[[str, int, int | None], None]
"""Receives what is being measured, the number of finished measurements and their total."""


class ProbeBar:
    """Reports each measurement.

    Args:
        progress: called with each; None for no reports.
        measurements: about how many there are.
    """

    def __init__(self, progress: ProbeProgress | None, measurements: int) -> None:
        self._progress, self._measurements = progress, measurements
        self._label = ""
        self._done = 0

    def label(self, label: str) -> None:
        """Names what is measured next."""
        self._label = label
        self._report()

    def step(self) -> None:
        """One more is measured."""
        self._done = min(self._done + 1, self._measurements - 1)
        self._report()

    def end(self) -> None:
        """All are measured."""
        self._done = self._measurements
        self._report()

    def _report(self) -> None:
        if self._progress is not None:
            self._progress(f"measuring {self._label}", self._done, self._measurements)
