"""Slowdowns: whether a run takes longer than it did before, than its peers, or than predicted."""

import math
from typing import Literal, NamedTuple

import numpy as np

from windlass.judge.change_points import (
    SMALLEST_CHANGE,
    WARM_UP_STEPS,
    Change,
    change_points,
    likeliest_change,
    stall_share,
)
from windlass.judge.evidence import Curve, Evidence
from windlass.judge.moderated_t import (
    FALSE_ALARM_RATE,
    FEWEST_PEERS,
    NoisePrior,
    PeerTest,
    moderated_t,
)
from windlass.judge.stragglers import (
    Culprit,
    find_culprit,
    is_wait,
    peer_levels,
    rank_levels,
    steady_straggler,
)
from windlass.schema import DEVIATIONS_OF_80_PERCENT
from windlass.units import format_seconds

_STALLS, _STALL_FACTOR = 0.1, 3.0
"""Stalls are a fault if a tenth of the steps stall, three times the share in any peer."""
_TENTH = 0.1
_SMALLEST_ERROR, _PREDICTION_FREEDOM = 0.03, 4.0
"""What the interval of a prediction counts for beside the errors in the record."""


class Slowdown(NamedTuple):
    """A step takes longer than it should."""

    sentence: str
    magnitude: float
    sigmas: float | None = None
    since: int | None = None
    culprit: Culprit | None = None
    steps: range = range(0)
    """The slow steps."""
    before: range | None = None
    """Steps before them that were not slow; None if there are none."""
    quantity: Literal["step time", "stalls"] = "step time"


def find_slowdown(evidence: Evidence) -> Slowdown | None:
    """How a run is slow; None if it is not. The surest sign wins."""
    test = peer_test(evidence)
    noise = test.deviation if test else evidence.prior.deviation
    least = max(SMALLEST_CHANGE, 2 * noise)
    return (
        _slower_than_before(evidence, least)
        or _slower_than_peers(evidence, test, least)
        or _stalls(evidence)
        or _slower_than_other_ranks(evidence, test, least)
        or _slower_than_predicted(evidence)
    )


def _slower_than_before(evidence: Evidence, least: float) -> Slowdown | None:
    """A change point after which steps take longer, to the end."""
    curve = after_warm_up(evidence.seconds)
    if not len(curve.steps):
        return None
    unit = float(np.median(curve.values))
    found: list[tuple[float, int, str | None]] = []
    if rise := _lasting_rise(change_points(curve.values, least=least), least * unit):
        found.append((rise[1], int(curve.steps[rise[0]]), None))
    for own_kind, values in evidence.ranks[0].kinds.items() if 0 in evidence.ranks else ():
        own = after_warm_up(Curve(evidence.ranks[0].steps, values))
        changes = () if is_wait(own_kind) else change_points(own.values, least=least, scale=unit)
        if rise := _lasting_rise(changes, least * unit):
            found.append((rise[1], int(own.steps[rise[0]]), own_kind))
    if not found:
        return None
    seconds, since, kind = max(found, key=lambda item: (item[2] is None, item[0]))
    before, after = range(int(curve.steps[0]), since), range(since, _last(curve) + 1)
    culprit = find_culprit(
        rank_levels(evidence.ranks, before), rank_levels(evidence.ranks, after), evidence
    )
    old = float(np.median(curve.values[curve.steps < since]))
    what = f"a step takes {longer_than(seconds / old)}"
    if kind is not None:
        what = f"`{kind}` takes {format_seconds(seconds)} longer than"
    return Slowdown(
        f"{what} before", seconds / old, since=since, culprit=culprit,
        steps=after, before=before,
    )  # fmt: skip


def _slower_than_peers(evidence: Evidence, test: PeerTest | None, least: float) -> Slowdown | None:
    """Slower than its peers; from a step on, if it was as fast as they are before."""
    if test is None or test.p >= FALSE_ALARM_RATE or test.shift < math.log1p(least):
        return None
    curve = after_warm_up(evidence.seconds)
    usual = float(np.median([peer.seconds for peer in evidence.peers]))
    split = likeliest_change(curve.values)
    since, before = None, None
    steps = range(WARM_UP_STEPS + 1, 1 + _last(evidence.seconds))
    levels = peer_levels([peer.kinds for peer in evidence.peers if peer.kinds])
    if float(np.median(curve.values[:split])) < usual * (1 + least):
        since = int(curve.steps[split])
        before, steps = range(int(curve.steps[0]), since), range(since, steps.stop)
        levels = rank_levels(evidence.ranks, before)
    culprit = find_culprit(levels, rank_levels(evidence.ranks, steps), evidence)
    magnitude = float(np.median(curve.values[split if before else 0 :])) / usual - 1
    return Slowdown(
        f"a step takes {longer_than(magnitude)} in its {test.peers} peers, whose noise is "
        f"{percent(test.deviation)} ({test.sigmas:+.1f} sigma)",
        magnitude, test.sigmas, since, culprit, steps=steps, before=before,
    )  # fmt: skip


def _stalls(evidence: Evidence) -> Slowdown | None:
    """Single steps that take more than twice as long as those around them."""
    curve = after_warm_up(evidence.seconds)
    share = stall_share(curve.values)
    of_peers = [peer.stalls for peer in evidence.peers if peer.stalls is not None]
    if share < _STALLS or len(of_peers) < FEWEST_PEERS or share < _STALL_FACTOR * max(of_peers):
        return None
    return Slowdown(
        f"{percent(share)} of the steps stall for more than twice the usual time, and at most "
        f"{percent(max(of_peers))} of those of its peers",
        share, quantity="stalls",
    )  # fmt: skip


def _slower_than_other_ranks(
    evidence: Evidence, test: PeerTest | None, least: float
) -> Slowdown | None:
    """One rank that is slow all along; only where no peers say how fast the run should be."""
    curve = after_warm_up(evidence.seconds)
    if test is not None or len(curve.steps) < WARM_UP_STEPS:
        return None
    steps = range(int(curve.steps[0]), int(curve.steps[-1]) + 1)
    culprit = steady_straggler(evidence, steps)
    step = float(np.median(curve.values))
    if culprit is None or culprit.seconds < least * step:
        return None
    return Slowdown(
        f"rank {culprit.ranks[0]} takes {format_seconds(culprit.seconds)} of each step longer than "
        "the ranks with the same layers",
        culprit.seconds / step, culprit=culprit, steps=steps,
    )  # fmt: skip


def _slower_than_predicted(evidence: Evidence) -> Slowdown | None:
    """Slower than its prediction, by more than predictions of other plans are off in the record.

    Only where no peers say how fast the run should be. A prediction alone raises no alarm: it may
    itself be wrong for this kind of plan.
    """
    test, predicted = prediction_test(evidence), evidence.predicted
    if len(evidence.peers) >= FEWEST_PEERS or test is None or predicted is None:
        return None
    if test.p >= FALSE_ALARM_RATE:
        return None
    measured = float(np.median(evidence.seconds.values))
    return Slowdown(
        f"a step takes {format_seconds(measured)}, and {format_seconds(predicted.seconds)} were "
        f"predicted, beside {test.peers} other plans whose predictions are off by "
        f"{percent(test.deviation)} ({test.sigmas:+.1f} sigma)",
        measured / predicted.seconds - 1, test.sigmas,
    )  # fmt: skip


def prediction_test(evidence: Evidence) -> PeerTest | None:
    """Measured over predicted time beside that of other plans; None with too few of them."""
    predicted = evidence.predicted
    if predicted is None or len(evidence.residuals) < FEWEST_PEERS or predicted.low <= 0:
        return None
    deviation = math.log(predicted.high / predicted.low) / (2 * DEVIATIONS_OF_80_PERCENT)
    measured = float(np.median(evidence.seconds.values)) if len(evidence.seconds.values) else 0.0
    if measured <= 0 or predicted.seconds <= 0:
        return None
    prior = NoisePrior(max(deviation, _SMALLEST_ERROR), _PREDICTION_FREEDOM)
    return moderated_t(math.log(measured / predicted.seconds), evidence.residuals, prior)


def peer_test(evidence: Evidence) -> PeerTest | None:
    """The step time beside that of the peers; None with too few of them."""
    values, peers = evidence.seconds.values, [peer.seconds for peer in evidence.peers]
    if len(peers) < FEWEST_PEERS or not len(values) or (measured := float(np.median(values))) <= 0:
        return None
    return moderated_t(math.log(measured), np.log(peers), evidence.prior)


def _lasting_rise(changes: tuple[Change, ...], least: float) -> tuple[int, float] | None:
    """Index and seconds of the largest rise, if the last level is still above the lowest one."""
    rises = [change for change in changes if change.after > change.before]
    if not rises:
        return None
    lowest = min(change.before for change in changes)
    seconds = changes[-1].after - lowest
    if seconds < least:
        return None
    return max(rises, key=lambda change: change.after - change.before).index, seconds


def after_warm_up(curve: Curve) -> Curve:
    """The steps of a curve without those of the warm-up."""
    return Curve(curve.steps[WARM_UP_STEPS:], curve.values[WARM_UP_STEPS:])


def _last(curve: Curve) -> int:
    return int(curve.steps[-1]) if len(curve.steps) else 0


def longer_than(share: float) -> str:
    """`31 % longer than`, or `4.3 times as long as`."""
    if share >= 1:
        return f"{1 + share:.2g} times as long as"
    return f"{percent(abs(share))} {'longer' if share >= 0 else 'shorter'} than"


def percent(share: float) -> str:
    """`31 %`, or `3.1 %` below ten."""
    return f"{100 * share:.0f} %" if share >= _TENTH else f"{100 * share:.1f} %"
