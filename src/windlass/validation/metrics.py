"""Score: how well predictions hold against what was measured, by table."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from windlass.validation.laws.formulas import Column, step_flop
from windlass.validation.predict_run import Predicted
from windlass.validation.runs import Run

LEAST_GROUP = 3
"""Runs of one model on one machine that make a group in which ranks say something."""
APART = 0.03
"""Runs whose times differ by less are equal to whoever picks a plan."""
_NOISES = 2.0
"""Or by less than so many times what repeats of one plan differ by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Of predicted over measured, less one."""

    rows: int
    mean: float
    """Of the absolute errors, as the next two."""
    median: float
    ninth: float
    """90th percentile."""
    most: float
    bias: float
    """Mean with its sign."""
    inside: float
    """Share inside the 80 % interval."""
    constant: float | None = None
    """Mean absolute error of one constant for the whole table, time = k FLOP / devices, k the best
    for these very rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """How runs of one model on one machine are ordered."""

    groups: int
    rows: int
    spearman: float
    """Mean over groups, each by its runs."""
    apart: float
    """By how much runs must differ to count below: 3 %, or twice what repeated runs differ by."""
    ordered: float
    """Share of the pairs further apart that are ordered as they were measured."""
    picked: float
    """Mean over groups: the run that is predicted fastest over the one that was, less one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """Which runs do not fit."""

    failed: int
    """That ran out of memory."""
    called: int
    """Of these, predicted not to fit."""
    falsely: int
    """Predicted not to fit, yet ran."""
    ran: int


def step_errors(found: Sequence[Predicted]) -> Errors | None:
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


def memory_errors(found: Sequence[Predicted]) -> Errors | None:
    """Of peak memory; None where nothing was measured."""
    held = [one for one in found if one.run.peak_bytes and one.peak_bytes]
    if not held:
        return None
    predicted = np.array([one.peak_bytes for one in held], dtype=float)
    measured = np.array([one.run.peak_bytes for one in held], dtype=float)
    inside = [
        (one.low_bytes or 0.0) <= nbytes <= (one.high_bytes or 0.0)
        for one, nbytes in zip(held, measured, strict=True)
    ]
    return _errors(predicted, measured, inside, None)


def memory_calls(found: Sequence[Predicted]) -> Calls | None:
    """Runs out of memory, called or not; None where a table tells of neither."""
    known = [one for one in found if one.fits is not None]
    failed = [one for one in known if one.run.failed]
    ran = [one for one in known if not one.run.failed and (one.run.peak_bytes or failed)]
    if not failed and not ran:
        return None
    return Calls(
        failed=len(failed),
        called=sum(not one.fits for one in failed),
        falsely=sum(not one.fits for one in ran),
        ran=len(ran),
    )


def ranks(found: Iterable[Predicted]) -> Ranks | None:
    """Order within groups of one model on one machine; None without such groups."""
    groups: dict[tuple[object, ...], list[Predicted]] = defaultdict(list)
    for one in found:
        if one.run.step_seconds:
            groups[one.run.group].append(one)
    large = [group for group in groups.values() if len(group) >= LEAST_GROUP]
    if not large:
        return None
    rows = [len(group) for group in large]
    apart = max(APART, _NOISES * noise([one.run for group in large for one in group]))
    right, pairs, coefficients, picked = 0.0, 0, [], []
    for group in large:
        measured = np.array([_per_sequence(one, one.run.step_seconds or 0.0) for one in group])
        predicted = np.array([_per_sequence(one, one.step_seconds) for one in group])
        coefficients.append(spearman(measured, predicted))
        picked.append(measured[np.argmin(predicted)] / measured.min() - 1.0)
        counted = pairs_ordered(measured, predicted, apart)
        right, pairs = right + counted.ordered, pairs + counted.apart
    return Ranks(
        groups=len(large),
        rows=sum(rows),
        spearman=float(np.average(coefficients, weights=rows)),
        apart=apart,
        ordered=right / pairs if pairs else 1.0,
        picked=float(np.mean(picked)),
    )


def noise(runs: Sequence[Run]) -> float:
    """Standard deviation of log(step time) between repeats of one plan; 0 without repeats."""
    repeats: dict[tuple[object, ...], list[float]] = defaultdict(list)
    for run in runs:
        if run.step_seconds:
            repeats[run.group, run.shape, run.cut].append(float(np.log(run.step_seconds)))
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


def _per_sequence(one: Predicted, seconds: float) -> float:
    """Runs of a group may differ in batch; a plan is as fast as the sequences it does."""
    cut = one.run.cut
    return seconds / (cut.micro * cut.accumulation * cut.replicas)


def _errors(
    predicted: Column, measured: Column, inside: Sequence[bool], constant: float | None
) -> Errors:
    signed = predicted / measured - 1.0
    errors = np.abs(signed)
    return Errors(
        rows=len(errors),
        mean=float(errors.mean()),
        median=float(np.median(errors)),
        ninth=float(np.quantile(errors, 0.9)),
        most=float(errors.max()),
        bias=float(signed.mean()),
        inside=float(np.mean(inside)),
        constant=constant,
    )


def _constant(found: Sequence[Predicted], measured: Column) -> float:
    """Mean absolute error of time = k FLOP / devices, k the median of what the rows say."""
    flop = np.array([
        float(
            step_flop(
                one.run.cut.micro * one.run.cut.accumulation * one.run.cut.replicas
                * one.run.shape.sequence,
                one.run.shape.parameters, one.run.shape.layers, one.run.shape.width,
                one.run.shape.sequence,
            )
        ) / one.run.cut.devices
        for one in found
    ])  # fmt: skip
    guessed = flop * np.median(measured / flop)
    return float(np.abs(guessed / measured - 1.0).mean())


_Ints = NDArray[np.int64]


class Pairs(NamedTuple):
    """Pairs of runs whose times differ by more than they are told apart by."""

    ordered: float
    """Predicted in the order that they were measured; a pair predicted alike counts a half."""
    apart: int
    """All of them."""


def pairs_ordered(measured: Column, predicted: Column, apart: float) -> Pairs:
    """Counts the pairs whose measured times differ by more than a factor of `exp(apart)`.

    Takes `n log^2 n` steps for n runs, not n^2: a table may have 100,000 of one group.
    """
    by_time = np.argsort(measured)
    times = np.log(measured[by_time])
    _, place = np.unique(predicted[by_time], return_inverse=True)
    faster = np.searchsorted(times, times - apart)
    less, not_more = (_below(place, faster, equal=equal) for equal in (False, True))
    return Pairs(ordered=float((less + not_more).sum()) / 2.0, apart=int(faster.sum()))


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
