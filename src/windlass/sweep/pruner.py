"""Which trials are not worth their remaining steps.

A trial is compared at certain steps, its rungs, with the trials of smaller numbers that came as
far, whether or not these have reached the step yet: the answer waits for them. So what is pruned
follows from the runs' values alone, as if they had run one after another, and neither the number of
jobs nor a killed driver changes it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from windlass.sweep.sweep_file import SweepRequest

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
    """Notes in each trial the rungs that it passed, and the one at which it is pruned.

    Args:
        trials: all trials by number.
    """
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
