"""Bands: does a loss or a gradient norm leave the band in which its peers, or its own past, are?"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from windlass.judge.change_points import block_size
from windlass.judge.evidence import Curve, DocumentCounts, Values
from windlass.judge.moderated_t import (
    FALSE_ALARM_RATE,
    FEWEST_PEERS,
    PeerTest,
    fit_noise_prior,
    moderated_t,
    t_survival,
)

_CURVE_FREEDOM = 10.0
"""Blocks of one curve are no independent groups, so that their prior counts for no more."""
_WINDOW = 20
_RUN_SIGMAS, _RUN_STEPS, _SPIKE_SIGMAS = 6.0, 3, 15.0
"""A loss leaves its own band if it is beyond 6 deviations for 3 steps on end, or once beyond 15."""
_WRONG_TARGET_NATS = 10.0
"""What a target adds that a confident model gets wrong: it had a probability of 5e-5."""
_LARGEST_DOCUMENT_P = 1e-3
_STEP_SIGMAS = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """A curve that leaves its band."""

    step: int
    """The first step outside."""
    ratio: float
    """Its value over the middle of the band, as the median of the blocks or steps outside."""
    sigmas: float
    peers: int
    """Runs that the band was made from; 0 if it is the curve's own past."""
    lasts: bool
    """Whether it stays outside to its end."""
    until: int | None = None
    """The last step outside on end, of a curve that left the band of its own past."""


def first_non_finite(curve: Curve) -> int | None:
    """The first step whose value is not finite; None if all are."""
    wrong = ~np.isfinite(curve.values)
    return int(curve.steps[np.argmax(wrong)]) if wrong.any() else None


def wrong_target_loss(targets: int | None) -> float:
    """What one target that a confident model gets wrong adds to a mean loss, `10 / n` nats.

    Where a loss is near zero, such targets are all that is left of it, and whether a step has one
    is chance: neither ratios of such losses nor their deviations say anything.

    Args:
        targets: the n targets that the loss is a mean over; None gives 0.
    """
    return _WRONG_TARGET_NATS / targets if targets else 0.0


def leaves_peers(
    curve: Curve, peers: Sequence[Curve], *, least: float, floor: float = 0.0
) -> Departure | None:
    """Where a curve of positive numbers leaves the band of its peers' curves, to either side.

    Medians of blocks of 20 steps are tested by a moderated t whose prior is fitted to all blocks;
    the probability of a false alarm is divided by the number of blocks.

    Args:
        least: smallest departure, as a logarithm.
        floor: smallest departure in the curve's own unit.
    """
    if not len(curve.steps) or (curve.values <= 0).any():
        return None
    size = block_size(int(curve.steps[-1]))
    own = _block_logs(curve, size)
    table: dict[int, list[float]] = {block: [] for block in own}
    for peer in peers:
        for block, value in _block_logs(peer, size).items():
            if block in table:
                table[block].append(value)
    known = {block: values for block, values in table.items() if len(values) >= FEWEST_PEERS}
    if not known:
        return None
    prior = fit_noise_prior(known.values())
    prior = prior._replace(freedom=min(prior.freedom, _CURVE_FREEDOM))
    tests = {block: moderated_t(own[block], values, prior) for block, values in known.items()}
    limit = FALSE_ALARM_RATE / len(tests)
    outside = [
        block
        for block, test in tests.items()
        if _is_outside(test, limit, least)
        and abs(math.exp(own[block]) - math.exp(own[block] - test.shift)) >= floor
    ]
    if not outside:
        return None
    first = tests[outside[0]]
    return Departure(
        step=_first_step(curve, peers, range(outside[0] * size + 1, (outside[0] + 1) * size + 1)),
        ratio=math.exp(float(np.median([tests[block].shift for block in outside]))),
        sigmas=max((tests[block].sigmas for block in outside), key=abs),
        peers=first.peers,
        lasts=outside[-1] == max(tests),
    )


def leaves_own_band(curve: Curve, *, floor: float = 0.0) -> Departure | None:
    """Where a loss rises out of the band of its own last 20 steps: a spike, or a divergence.

    Args:
        floor: smallest rise that counts, in the curve's own unit.
    """
    if len(curve.values) < 2 * _WINDOW or not np.isfinite(curve.values).all():
        return None
    past = np.median(sliding_window_view(curve.values, _WINDOW)[:-1], axis=1)
    rise = curve.values[_WINDOW:] - past
    middle = np.median(rise)
    deviation = 1.4826 * float(np.median(np.abs(rise - middle)))
    if not deviation:
        return None
    sigmas = np.where(rise - middle < floor, 0.0, (rise - middle) / deviation)
    runs = sliding_window_view(sigmas, _RUN_STEPS).min(axis=1) > _RUN_SIGMAS
    spikes = sigmas > _SPIKE_SIGMAS
    starts = [int(np.argmax(found)) for found in (runs, spikes) if found.any()]
    if not starts:
        return None
    index = min(starts)
    inside = sigmas[index:] <= _RUN_SIGMAS
    outside = int(np.argmax(inside)) if inside.any() else len(inside)
    return Departure(
        step=int(curve.steps[_WINDOW + index]),
        ratio=float(curve.values[_WINDOW + index] / past[index]) if past[index] else math.inf,
        sigmas=float(sigmas[index]),
        peers=0,
        lasts=bool((sigmas[-_RUN_STEPS:] > _RUN_SIGMAS).all()),
        until=int(curve.steps[_WINDOW + index + outside - 1]),
    )


def constant_ratio(curve: Curve, peers: Sequence[Curve]) -> float | None:
    """The ratio of a curve to the median of its peers', if it is one number at all steps."""
    middle = _middle(curve.steps, peers)
    valid = np.isfinite(middle) & (middle > 0) & (curve.values > 0)
    if not valid.any():
        return None
    ratios = curve.values[valid] / middle[valid]
    ratio = float(np.median(ratios))
    return ratio if np.allclose(ratios, ratio, rtol=1e-3) else None


def suspect_documents(
    curve: Curve, peers: Sequence[Curve], documents: DocumentCounts, *, most: int = 3
) -> tuple[str, ...]:
    """The documents whose samples go with a high loss, the likeliest first.

    The loss less that of the peers at the same step, or else less its own median around it, is
    correlated with the number of samples of each document.

    Args:
        peers: losses of earlier runs; may be empty.
    """
    steps, own, rows = np.intersect1d(curve.steps, documents.steps, return_indices=True)
    middle = _middle(steps, peers)
    if len(steps) <= _WINDOW:
        return ()
    values = curve.values[own]
    if not np.isfinite(middle).all():
        padded = np.pad(values, _WINDOW // 2, mode="edge")[: len(values) + _WINDOW - 1]
        middle = np.median(sliding_window_view(padded, _WINDOW), axis=1)
    rise = values - middle
    counts = documents.counts[rows]
    varying = counts.std(axis=0) > 0
    counts, names = counts[:, varying], np.asarray(documents.names)[varying]
    if not len(names) or not np.isfinite(rise).all() or rise.std() == 0:
        return ()
    centred = counts - counts.mean(axis=0)
    correlation = centred.T @ (rise - rise.mean()) / (len(rise) * counts.std(axis=0) * rise.std())
    bounded = np.clip(correlation, -0.999999, 0.999999)
    freedom = len(rise) - 2
    t = bounded * np.sqrt(freedom / (1 - bounded**2))
    order = np.argsort(-t)[:most]
    limit = _LARGEST_DOCUMENT_P / len(names)
    return tuple(str(names[at]) for at in order if t_survival(float(t[at]), freedom) < limit)


def _is_outside(test: PeerTest, limit: float, least: float) -> bool:
    two_sided = 2 * (test.p if test.sigmas > 0 else 1 - test.p)
    return two_sided < limit and abs(test.shift) >= least


def _block_logs(curve: Curve, size: int) -> dict[int, float]:
    """Logarithm of the median of each complete block of steps, by the block's index."""
    blocks = (curve.steps - 1) // size
    logs = {}
    starts = np.flatnonzero(np.diff(blocks, prepend=-1))
    for values, block in zip(np.split(curve.values, starts[1:]), blocks[starts], strict=True):
        if len(values) == size and np.isfinite(values).all():
            middle = float(np.median(values))
            if middle > 0:
                logs[int(block)] = math.log(middle)
    return logs


def _first_step(curve: Curve, peers: Sequence[Curve], block: range) -> int:
    """The first step of a block that is far from its peers; the block's first if none alone is."""
    inside = np.isin(curve.steps, block)
    steps, values = curve.steps[inside], curve.values[inside]
    table = np.stack([_at(steps, peer) for peer in peers])
    with np.errstate(all="ignore"):
        middle = np.nanmedian(table, axis=0)
        deviation = 1.4826 * np.nanmedian(np.abs(table - middle), axis=0)
    far = np.abs(values - middle) > _STEP_SIGMAS * np.median(deviation)
    return int(steps[np.argmax(far)]) if far.any() else int(steps[0])


def _middle(steps: npt.NDArray[np.int64], peers: Sequence[Curve]) -> Values:
    """Median of the peers at each step; NaN where no peer has the step."""
    table = np.stack([_at(steps, peer) for peer in peers]) if peers else np.empty((0, len(steps)))
    known = np.isfinite(table).any(axis=0) if len(table) else np.zeros(len(steps), dtype=bool)
    middle = np.full(len(steps), np.nan)
    if known.any():
        middle[known] = np.nanmedian(table[:, known], axis=0)
    return middle


def _at(steps: npt.NDArray[np.int64], curve: Curve) -> Values:
    """Values of a curve at some steps; NaN where it has none."""
    values = np.full(len(steps), np.nan)
    if len(curve.steps):
        found = np.minimum(np.searchsorted(curve.steps, steps), len(curve.steps) - 1)
        same = curve.steps[found] == steps
        values[same] = curve.values[found[same]]
    return values
