"""What a sweep has found: its best trials, and how much each key matters."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from windlass.sweep.search_space import Dimension
from windlass.sweep.sweep_file import SweepRequest, Trial

_GROUPS = 4
"""Parts into which a range is divided, of equally many trials each."""
_FEWEST = 8
"""Trials without which nothing is said."""


def best_trials(request: SweepRequest, trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """The best finished trial; with several objectives all that no other beats in each of them."""
    signs = np.array([-1.0 if large else 1.0 for _, large in request.directions()])
    done = [trial for trial in trials if trial.state == "finished" and trial.values]
    values = np.array([trial.values for trial in done]).reshape(len(done), len(signs)) * signs
    best = [
        trial
        for trial, own in zip(done, values, strict=True)
        if not any((other <= own).all() and (other < own).any() for other in values)
    ]
    return tuple(best[:1] if len(signs) == 1 else best)


def ranked_trials(request: SweepRequest, trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """The trials with a result, the best by the first objective first.

    Pruned trials come behind all finished ones, and those that came further before the others.
    """
    sign = -1.0 if request.directions()[0][1] else 1.0
    known = [t for t in trials if t.state in ("finished", "pruned") and t.values]
    return tuple(
        sorted(known, key=lambda t: (t.state, -(t.pruned_at or 0), sign * t.values[0], t.number))
    )


def importance(request: SweepRequest, trials: Sequence[Trial]) -> Mapping[str, float]:
    """The share of the spread of the first objective's ranks that each key explains, 0 to 1.

    It is `(H - k + 1) / (n - k)` of a Kruskal-Wallis test over `k` parts of the range of the key,
    or over its choices (Tomczak & Tomczak 2014, Trends in Sport Sciences 1(21)). So a learning rate
    of which the middle is best counts as well as one of which the lowest is, and a key without
    influence has about 0. Keys are looked at one by one: what two of them do only together is not
    seen.

    Args:
        trials: its trials; those with a result count, as `ranked_trials` orders them.

    Returns:
        By dotted key, the largest first; empty with fewer than 8 results.
    """
    ranked = ranked_trials(request, trials)
    if len(ranked) < _FEWEST:
        return {}
    ranks = np.arange(float(len(ranked)))
    shares = {one.key: _share(_groups(one, ranked), ranks) for one in request.dimensions()}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def _share(groups: npt.NDArray[np.int64], ranks: npt.NDArray[np.float64]) -> float:
    """The share of the spread of the ranks that lies between groups, beyond what chance gives."""
    names, counts = np.unique(groups, return_counts=True)
    count, parts = len(ranks), len(names)
    spread = float(((ranks - ranks.mean()) ** 2).sum())
    if parts < 2 or parts >= count or not spread:
        return 0.0
    means = np.array([ranks[groups == name].mean() for name in names])
    between = float((counts * (means - ranks.mean()) ** 2).sum())
    statistic = (count - 1) * between / spread
    return float(np.clip((statistic - parts + 1) / (count - parts), 0.0, 1.0))


def _groups(dimension: Dimension, trials: Sequence[Trial]) -> npt.NDArray[np.int64]:
    """Part of the range, or position of the choice, of each trial."""
    places = np.array([dimension.position(trial.params[dimension.key]) for trial in trials])
    known = np.unique(places)
    if len(known) <= _GROUPS or dimension.kind == "choice":
        return np.searchsorted(known, places)
    edges = np.quantile(places, np.linspace(0, 1, _GROUPS + 1)[1:-1])
    return np.searchsorted(edges, places, side="left")
