"""Score: how well predictions hold against what was measured, by table."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from windlass.validation.formulas import Column, step_flop
from windlass.validation.predict_run import RunPrediction
from windlass.validation.published_run import PublishedRun

MIN_GROUP_ROWS = 3
"""Runs of one model on one machine that make a group in which ranks say something."""
MIN_DISTINCT_GAP = 0.03
"""Runs whose times differ by less are equal to whoever picks a plan."""
_NOISES = 2.0
"""Or by less than so many times what repeats of one plan differ by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelativeErrors:
    """Of predicted over measured, less one."""

    rows: int
    mean: float
    """Of the absolute errors, as the next two."""
    median: float
    p90: float
    """90th percentile."""
    worst: float
    bias: float
    """Mean with its sign."""
    interval_coverage: float
    """Share inside the 80 % interval."""
    baseline: float | None = None
    """Mean absolute error of one constant for the whole table, time = k FLOP / devices, k the best
    for these very rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAccuracy:
    """How runs of one model on one machine are ordered."""

    groups: int
    rows: int
    spearman: float
    """Mean over groups, each by its runs."""
    distinct_gap: float
    """By how much runs must differ to count below: 3 %, or twice what repeated runs differ by."""
    ordered_share: float
    """Share of the pairs further apart that are ordered as they were measured."""
    picked_slowdown: float
    """Mean over groups: the run that is predicted fastest over the one that was, less one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemoryAccuracy:
    """Which runs do not fit."""

    ran_out: int
    """That ran out of memory."""
    foreseen: int
    """Of these, predicted not to fit."""
    false_alarms: int
    """Predicted not to fit, yet ran."""
    ran: int


def step_errors(found: Sequence[RunPrediction]) -> RelativeErrors | None:
    """Of step time; None where nothing was measured."""
    timed = [one for one in found if one.run.step_seconds]
    if not timed:
        return None
    predicted = np.array([one.step_seconds for one in timed])
    measured = np.array([one.run.step_seconds for one in timed], dtype=float)
    inside = [
        one.low_seconds <= seconds <= one.high_seconds
        for one, seconds in zip(timed, measured, strict=True)
    ]
    return _errors(predicted, measured, inside, _constant(timed, measured))


def memory_errors(found: Sequence[RunPrediction]) -> RelativeErrors | None:
    """Of peak memory; None where nothing was measured."""
    held = [one for one in found if one.run.peak_bytes and one.peak_bytes]
    if not held:
        return None
    predicted = np.array([one.peak_bytes for one in held], dtype=float)
    measured = np.array([one.run.peak_bytes for one in held], dtype=float)
    inside = [
        (one.low_peak_bytes or 0.0) <= nbytes <= (one.high_peak_bytes or 0.0)
        for one, nbytes in zip(held, measured, strict=True)
    ]
    return _errors(predicted, measured, inside, None)


def out_of_memory_accuracy(found: Sequence[RunPrediction]) -> OutOfMemoryAccuracy | None:
    """Runs out of memory, called or not; None where a table tells of neither."""
    known = [one for one in found if one.fits is not None]
    failed = [one for one in known if one.run.out_of_memory]
    ran = [one for one in known if not one.run.out_of_memory and (one.run.peak_bytes or failed)]
    if not failed and not ran:
        return None
    return OutOfMemoryAccuracy(
        ran_out=len(failed),
        foreseen=sum(not one.fits for one in failed),
        false_alarms=sum(not one.fits for one in ran),
        ran=len(ran),
    )


def rank_accuracy(found: Iterable[RunPrediction]) -> RankAccuracy | None:
    """Order within groups of one model on one machine; None without such groups."""
    groups: dict[tuple[object, ...], list[RunPrediction]] = defaultdict(list)
    for one in found:
        if one.run.step_seconds:
            groups[one.run.group].append(one)
    large = [group for group in groups.values() if len(group) >= MIN_GROUP_ROWS]
    if not large:
        return None
    rows = [len(group) for group in large]
    apart = max(
        MIN_DISTINCT_GAP, _NOISES * repeat_noise([one.run for group in large for one in group])
    )
    right, pairs, coefficients, picked = 0.0, 0, [], []
    for group in large:
        measured = np.array([_per_sequence(one, one.run.step_seconds or 0.0) for one in group])
        predicted = np.array([_per_sequence(one, one.step_seconds) for one in group])
        coefficients.append(spearman(measured, predicted))
        picked.append(measured[np.argmin(predicted)] / measured.min() - 1.0)
        counted = count_ordered_pairs(measured, predicted, apart)
        right, pairs = right + counted.ordered, pairs + counted.distinct
    return RankAccuracy(
        groups=len(large),
        rows=sum(rows),
        spearman=float(np.average(coefficients, weights=rows)),
        distinct_gap=apart,
        ordered_share=right / pairs if pairs else 1.0,
        picked_slowdown=float(np.mean(picked)),
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
    """Rank correlation, equal values sharing their ranks; 1 where one of them does not vary."""
    first, second = _ranked(one), _ranked(other)
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return 1.0
    return float(np.corrcoef(first, second)[0, 1])


def _ranked(values: Column) -> Column:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    middle: NDArray[np.float64] = last - (counts - 1) / 2.0
    return middle[inverse]


def _per_sequence(one: RunPrediction, seconds: float) -> float:
    """Runs of a group may differ in batch; a plan is as fast as the sequences it does."""
    cut = one.run.config
    return seconds / (cut.micro * cut.accumulation * cut.replicas)


def _errors(
    predicted: Column, measured: Column, inside: Sequence[bool], constant: float | None
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
        baseline=constant,
    )


def _constant(found: Sequence[RunPrediction], measured: Column) -> float:
    """Mean absolute error of time = k FLOP / devices, k the median of what the rows say."""
    flop = np.array([
        float(
            step_flop(
                one.run.config.micro * one.run.config.accumulation * one.run.config.replicas
                * one.run.shape.sequence,
                one.run.shape.parameters, one.run.shape.layers, one.run.shape.width,
                one.run.shape.sequence,
            )
        ) / one.run.config.devices
        for one in found
    ])  # fmt: skip
    guessed = flop * np.median(measured / flop)
    return float(np.abs(guessed / measured - 1.0).mean())


_Ints = NDArray[np.int64]


class OrderedPairs(NamedTuple):
    """Pairs of runs whose times differ by more than they are told apart by."""

    ordered: float
    """Predicted in the order that they were measured; a pair predicted alike counts a half."""
    distinct: int
    """All of them."""


def count_ordered_pairs(measured: Column, predicted: Column, gap: float) -> OrderedPairs:
    """Counts the pairs whose measured times differ by more than a factor of `exp(apart)`.

    Takes `n log^2 n` steps for n runs, not n^2: a table may have 100,000 of one group.
    """
    by_time = np.argsort(measured)
    times = np.log(measured[by_time])
    _, place = np.unique(predicted[by_time], return_inverse=True)
    faster = np.searchsorted(times, times - gap)
    less, not_more = (_below(place, faster, equal=equal) for equal in (False, True))
    return OrderedPairs(ordered=float((less + not_more).sum()) / 2.0, distinct=int(faster.sum()))


def _below(values: _Ints, firsts: _Ints, *, equal: bool) -> _Ints:
    """For each value how many of the first `firsts` values are below it.

    The first k values are blocks of powers of two, one for each bit of k; in each, sorted, a place
    is looked up.

    Args:
        values: 0 to their number less one.
        firsts: how many of the first values each is compared with.
        equal: whether equal ones count too.
    """
    count = len(values)
    found = np.zeros(count, dtype=np.int64)
    size = 1
    while size <= count:
        blocks = np.sort(np.arange(count) // size * count + values)
        asking = np.flatnonzero(firsts & size)
        block = firsts[asking] // (2 * size) * 2
        asked = block * count + values[asking]
        places = np.searchsorted(blocks, asked, side="right" if equal else "left")
        found[asking] += places - block * size
        size *= 2
    return found
