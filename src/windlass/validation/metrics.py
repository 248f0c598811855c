"""Metrics of predictions against measurements: errors, rank correlation, out-of-memory calls."""

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from windlass.validation.predict_run import RunPrediction
from windlass.validation.published_run import PublishedRun

Column = NDArray[np.float64]
"""One number for each run, `[run]`."""

MIN_GROUP_ROWS = 3
"""Smallest number of runs of one model on one machine that are ranked."""
MIN_DISTINCT_GAP = 0.03
"""Runs whose log step times differ by less than this count as equally fast."""
_NOISE_FACTOR = 2.0
"""So do runs that differ by less than this multiple of the noise between repeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelativeErrors:
    """Errors of predictions, relative to the measurements: `predicted / measured - 1`."""

    rows: int
    mean: float
    """Mean absolute error."""
    median: float
    """Median absolute error."""
    p90: float
    """90th percentile of the absolute error."""
    worst: float
    """Largest absolute error."""
    bias: float
    """Mean signed error."""
    interval_coverage: float
    """Share of measurements inside the 80 % interval."""
    baseline: float | None = None
    """Mean absolute error of the simplest model, `time = k FLOP / devices`, with the best k for
    these rows; None for memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAccuracy:
    """How well predictions rank the runs of one model on one machine."""

    groups: int
    rows: int
    spearman: float
    """Mean rank correlation over groups, weighted by their runs."""
    distinct_gap: float
    """Smallest difference of log step times that counts: 3 %, or twice the noise of repeats."""
    ordered_share: float
    """Share of the pairs with a larger difference whose predicted order is the measured one."""
    picked_slowdown: float
    """Mean over groups of the time lost by picking the run that is predicted fastest: its measured
    time over the fastest measured time, minus one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemoryAccuracy:
    """How well out-of-memory failures are predicted."""

    ran_out: int
    """Runs that ran out of memory."""
    foreseen: int
    """Runs out of memory that were predicted not to fit."""
    false_alarms: int
    """Runs that fit but were predicted not to."""
    ran: int
    """Runs that fit."""


def step_errors(predictions: Sequence[RunPrediction]) -> RelativeErrors | None:
    """Errors of step time; None if none was measured."""
    timed = [one for one in predictions if one.run.step_seconds]
    if not timed:
        return None
    predicted = np.array([one.step_seconds for one in timed])
    measured = np.array([one.run.step_seconds for one in timed], dtype=float)
    inside = [
        one.low_seconds <= seconds <= one.high_seconds
        for one, seconds in zip(timed, measured, strict=True)
    ]
    return _relative_errors(predicted, measured, inside, _baseline_error(timed, measured))


def memory_errors(predictions: Sequence[RunPrediction]) -> RelativeErrors | None:
    """Errors of peak memory; None if none was measured."""
    with_peak = [one for one in predictions if one.run.peak_bytes and one.peak_bytes]
    if not with_peak:
        return None
    predicted = np.array([one.peak_bytes for one in with_peak], dtype=float)
    measured = np.array([one.run.peak_bytes for one in with_peak], dtype=float)
    inside = [
        (one.low_peak_bytes or 0.0) <= nbytes <= (one.high_peak_bytes or 0.0)
        for one, nbytes in zip(with_peak, measured, strict=True)
    ]
    return _relative_errors(predicted, measured, inside, None)


def out_of_memory_accuracy(predictions: Sequence[RunPrediction]) -> OutOfMemoryAccuracy | None:
    """Out-of-memory failures and their predictions; None if the runs state nothing about memory."""
    checked = [one for one in predictions if one.fits is not None]
    failed = [one for one in checked if one.run.out_of_memory]
    ran = [one for one in checked if not one.run.out_of_memory and (one.run.peak_bytes or failed)]
    if not failed and not ran:
        return None
    return OutOfMemoryAccuracy(
        ran_out=len(failed),
        foreseen=sum(not one.fits for one in failed),
        false_alarms=sum(not one.fits for one in ran),
        ran=len(ran),
    )


def rank_accuracy(predictions: Iterable[RunPrediction]) -> RankAccuracy | None:
    """Ranking within groups of one model on one machine; None if no group is large enough."""
    groups: dict[tuple[object, ...], list[RunPrediction]] = defaultdict(list)
    for one in predictions:
        if one.run.step_seconds:
            groups[one.run.group].append(one)
    large = [group for group in groups.values() if len(group) >= MIN_GROUP_ROWS]
    if not large:
        return None
    rows = [len(group) for group in large]
    noise = repeat_noise([one.run for group in large for one in group])
    gap = max(MIN_DISTINCT_GAP, _NOISE_FACTOR * noise)
    ordered, pairs, coefficients, slowdowns = 0.0, 0, [], []
    for group in large:
        # Runs of a group may differ in batch size.
        measured = np.array([(one.run.step_seconds or 0.0) / _sequences(one.run) for one in group])
        predicted = np.array([one.step_seconds / _sequences(one.run) for one in group])
        coefficients.append(spearman(measured, predicted))
        slowdowns.append(measured[np.argmin(predicted)] / measured.min() - 1.0)
        counts = count_ordered_pairs(measured, predicted, gap)
        ordered, pairs = ordered + counts.ordered, pairs + counts.distinct
    return RankAccuracy(
        groups=len(large),
        rows=sum(rows),
        spearman=float(np.average(coefficients, weights=rows)),
        distinct_gap=gap,
        ordered_share=ordered / pairs if pairs else 1.0,
        picked_slowdown=float(np.mean(slowdowns)),
    )


def repeat_noise(runs: Sequence[PublishedRun]) -> float:
    """Standard deviation of log(step time) between repeats of one plan; 0 without repeats."""
    repeats: dict[tuple[object, ...], list[float]] = defaultdict(list)
    for run in runs:
        if run.step_seconds:
            repeats[run.group, run.shape, run.config].append(float(np.log(run.step_seconds)))
    spreads = [(np.var(times, ddof=1), len(times) - 1) for times in repeats.values() if times[1:]]
    if not spreads:
        return 0.0
    variances, weights = zip(*spreads, strict=True)
    return float(np.sqrt(np.average(variances, weights=weights)))


def spearman(one: Column, other: Column) -> float:
    """Spearman's rank correlation with average ranks for ties; 1 if one side is constant."""
    ranks, other_ranks = _ranks(one), _ranks(other)
    if np.ptp(ranks) == 0 or np.ptp(other_ranks) == 0:
        return 1.0
    return float(np.corrcoef(ranks, other_ranks)[0, 1])


def _ranks(values: Column) -> Column:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    average: NDArray[np.float64] = last - (counts - 1) / 2.0
    return average[inverse]


def _sequences(run: PublishedRun) -> float:
    """Sequences in a step."""
    return run.config.micro * run.config.accumulation * run.config.replicas


def _relative_errors(
    predicted: Column, measured: Column, inside: Sequence[bool], baseline: float | None
) -> RelativeErrors:
    signed = predicted / measured - 1.0
    errors = np.abs(signed)
    return RelativeErrors(
        rows=len(errors),
        mean=float(errors.mean()),
        median=float(np.median(errors)),
        p90=float(np.quantile(errors, 0.9)),
        worst=float(errors.max()),
        bias=float(signed.mean()),
        interval_coverage=float(np.mean(inside)),
        baseline=baseline,
    )


def _baseline_error(predictions: Sequence[RunPrediction], measured: Column) -> float:
    """Mean absolute error of `time = k FLOP / devices` with the median k of these rows."""
    tokens = np.array([_sequences(one.run) * one.run.shape.sequence for one in predictions])
    shares = [one.run.shape.flop_per_token / one.run.config.devices for one in predictions]
    flop = tokens * np.array(shares)
    guessed = flop * np.median(measured / flop)
    return float(np.abs(guessed / measured - 1.0).mean())


class OrderedPairs(NamedTuple):
    """Counts of pairs of runs whose measured times differ clearly."""

    ordered: float
    """Pairs predicted in the measured order; a pair that is predicted equal counts a half."""
    distinct: int
    """All clearly different pairs."""


def count_ordered_pairs(measured: Column, predicted: Column, gap: float) -> OrderedPairs:
    """Counts the pairs whose measured times differ by more than a factor of `exp(gap)`.

    Args:
        measured: seconds [run].
        predicted: seconds [run].
    """
    by_time = np.argsort(measured)
    times, guesses = np.log(measured[by_time]), predicted[by_time]
    faster = np.searchsorted(times, times - gap)
    seen: list[float] = []  # predictions of clearly faster runs, sorted
    ordered = 0.0
    for guess, count in zip(guesses.tolist(), faster.tolist(), strict=True):
        for other in guesses[len(seen) : count].tolist():
            insort(seen, other)
        ordered += (bisect_left(seen, guess) + bisect_right(seen, guess)) / 2
    return OrderedPairs(ordered=ordered, distinct=int(faster.sum()))
