"""Asks for the next point of the space; Optuna's samplers, made anew for each question.

What they know of earlier trials comes from the files of the sweep, and each trial has a seed of its
own. So a point follows from the seed, its number and what was known then: a driver that was killed
and started again asks for the same points of a random search, and never for one twice.

A trial is compared at certain steps, its rungs, with the trials of smaller numbers that came as
far, whether or not these have reached the step yet: the answer waits for them. So what is pruned
follows from the runs' values alone, as if they had run one after another, and neither the number of
jobs nor a killed driver changes it.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from windlass.errors import RequestError
from windlass.sweep.search_space import Choice, Dimension, grid_point
from windlass.sweep.sweep_file import SweepRequest, Trial

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial


def next_point(request: SweepRequest, trials: Iterable[Trial], number: int) -> dict[str, Choice]:
    """The point of the space that a trial tries, by dotted key.

    Raises:
        RequestError: the sampler needs Optuna, which is not installed.
    """
    space = request.dimensions()
    if request.sampler == "grid":
        return grid_point(space, number)
    try:
        import optuna
    except ImportError:
        raise RequestError(
            f"sampler `{request.sampler}` needs Optuna; install it with `pip install "
            "'windlass[sweep]'`, or write `--sampler grid`"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    digest = hashlib.sha256(f"{request.seed} {number}".encode()).digest()
    seed = int.from_bytes(digest[:4], "little")
    is_random = request.sampler == "random"
    samplers = optuna.samplers
    study = optuna.create_study(
        sampler=samplers.RandomSampler(seed=seed) if is_random else samplers.TPESampler(seed=seed),
        directions=["maximize" if large else "minimize" for _, large in request.directions()],
    )
    distributions = {dimension.key: _distribution(dimension) for dimension in space}
    for trial in () if is_random else sorted(trials, key=lambda trial: trial.number):
        told = _told(trial, space, distributions)
        if told is not None:
            study.add_trial(told)
    params = study.ask(fixed_distributions=distributions).params
    return {
        one.key: one.choices[params[one.key]] if one.kind == "choice" else params[one.key]
        for one in space
    }


def _told(
    trial: Trial, space: Sequence[Dimension], distributions: "dict[str, BaseDistribution]"
) -> "FrozenTrial | None":
    """The trial as Optuna knows it; None if there is nothing to learn from it."""
    from optuna.trial import TrialState, create_trial

    states = {
        "finished": TrialState.COMPLETE,
        "pruned": TrialState.PRUNED,
        "failed": TrialState.FAIL,
        "waiting": TrialState.RUNNING,
        "running": TrialState.RUNNING,
    }
    if trial.state == "pruned" and not trial.values:
        return None
    params = {
        one.key: one.index(trial.params[one.key]) if one.kind == "choice" else trial.params[one.key]
        for one in space
    }
    values = trial.values if trial.state in ("finished", "pruned") else None
    pruned = {} if trial.pruned_at is None else {trial.pruned_at: trial.values[0]}
    return create_trial(
        state=states[trial.state],
        values=values,
        params=params,
        distributions=distributions,
        intermediate_values=pruned if trial.state == "pruned" else None,
    )


def _distribution(dimension: Dimension) -> "BaseDistribution":
    from optuna.distributions import (
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )

    if dimension.kind == "choice":  # by position, as Optuna takes no lists
        return CategoricalDistribution(tuple(range(len(dimension.choices))))
    if dimension.kind == "int":
        return IntDistribution(
            int(dimension.low), int(dimension.high), log=dimension.log, step=dimension.step
        )
    return FloatDistribution(dimension.low, dimension.high, log=dimension.log)


_FEWEST_TRIALS = 4
"""Trials that the median pruner wants at a rung before it prunes there."""
_REDUCTION = 4
"""The halving pruner keeps one in so many; its rungs are as far apart."""


@dataclass(slots=True, kw_only=True)
class TrialCurve:
    """What the pruner knows of one trial; a driver makes it anew from the runs' folders."""

    values: Mapping[int, float] = field(default_factory=dict)
    """The objective at each rung that the run has reached, smaller is better; may be NaN."""
    has_ended: bool = False
    """Whether it will reach no further rung."""
    passed: int = 0
    """The last rung at which it was decided to go on; 0 before the first."""
    pruned_at: int | None = None

    def came_to(self, rung: int) -> bool | None:
        """Whether it counts at a rung; None if that is not known yet."""
        if self.pruned_at is not None:
            return rung in self.values and rung <= self.pruned_at
        if rung not in self.values:
            return False if self.has_ended else None
        earlier = [known for known in self.values if known < rung]
        return True if not earlier or max(earlier) <= self.passed else None


def rungs(request: SweepRequest, steps: int) -> Iterator[int]:
    """The steps before the last one at which a trial is compared."""
    if request.pruner == "none":
        return
    rung = request.prune_from
    while rung < steps:
        yield rung
        rung = rung * _REDUCTION if request.pruner == "halving" else rung + request.prune_every


def decide(request: SweepRequest, trials: Sequence[TrialCurve]) -> None:
    """Notes in each trial the rungs that it passed, and the one at which it is pruned."""
    for number, trial in enumerate(trials):
        while trial.pruned_at is None:
            rung = min((rung for rung in trial.values if rung > trial.passed), default=None)
            if rung is None:
                break
            came = [earlier.came_to(rung) for earlier in trials[:number]]
            if None in came:
                break
            peers = [
                earlier.values[rung]
                for earlier, counts in zip(trials, came, strict=False)
                if counts and not math.isnan(earlier.values[rung])
            ]
            if is_worse(request, trial.values[rung], peers):
                trial.pruned_at = rung
            else:
                trial.passed = rung


def is_worse(request: SweepRequest, value: float, peers: Sequence[float]) -> bool:
    """Whether a trial is pruned at a rung.

    `median`: its value is above the median of the others (Golovin et al. 2017, KDD, section 3.2,
    with the value in place of its running mean). `halving`: it is not among the best quarter of all
    that came there, itself included; the best so far always goes on (Li et al. 2020, MLSys,
    algorithm 2, which suspends what is pruned here).

    Args:
        value: of the trial at the rung, smaller is better.
        peers: those of the trials before it.
    """
    if math.isnan(value):
        return True
    if request.pruner == "median":
        return len(peers) >= _FEWEST_TRIALS and value > median(peers)
    best = sorted([*peers, value])
    return value > best[max(0, len(best) // _REDUCTION - 1)]
