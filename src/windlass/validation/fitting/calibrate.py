"""Calibrate: constants of a stack from some of its rows, and how far others lie from them.

Rows are taken evenly from all that there are in the order of their cut and shape, from a place that
the seed decides: no measured number has a say. The interval is what the taken rows miss when each
tenth of them is predicted from the others.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from windlass.validation.fitting.least_squares import fit_constants
from windlass.validation.formulas import Column
from windlass.validation.laws.gpu_memory import peak_bytes
from windlass.validation.predict_run import LAWS, predict_runs, run_columns
from windlass.validation.published_run import PublishedRun, RunColumns
from windlass.validation.software_stacks import stack_catalog
from windlass.validation.stack_constants import (
    P90_Z,
    UNFITTED_SPREAD,
    ConstantPrior,
    prior_calibration,
    priors,
)

FOLDS = 10
_DOUBT_ROWS = 0.3
"""Rows' worth of doubt, as wide as between unfitted clusters, that is added to what folds miss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedConstants:
    """What `fitted/*.toml` says of one stack."""

    constants: Mapping[str, float]
    rows: tuple[str, ...]
    step_spread: float
    memory_spread: float


def calibration_runs(runs: Sequence[PublishedRun], count: int, seed: int) -> list[PublishedRun]:
    """`count` of the runs, spread evenly over their cuts and shapes; all where there are fewer."""
    ordered = sorted(runs, key=_place)
    if len(ordered) <= count:
        return ordered
    start = random.Random(seed).random()
    step = len(ordered) / count
    return [ordered[int((turn + start) * step)] for turn in range(count)]


def _place(run: PublishedRun) -> tuple[object, ...]:
    cut, shape = run.config, run.shape
    return (
        run.device,
        shape.width, shape.heads, cut.tensor, cut.pipeline, cut.recompute_share, shape.sequence, cut.micro,
        cut.replicas, shape.layers, run.key,
    )  # fmt: skip


def fit_stack(
    stack: str,
    runs: Sequence[PublishedRun],
    begin: Mapping[str, float],
    *,
    still: frozenset[str],
    spreads: Mapping[str, float],
    tight: float,
) -> FittedConstants:
    """The most probable constants of a stack, and its intervals.

    Args:
        stack: its name.
        runs: to fit from; one that leaves its cut open has the one that is fastest to begin with.
        begin: `law.name` -> value that the fit begins from and leans to.
        still: constants of the law that these runs say nothing of.
        spreads: constant -> factor on its prior's spread.
        tight: the factor of all others.
    """
    law = stack_catalog().stack(stack).law
    settled = predict_runs(runs, lambda _: prior_calibration(stack, begin))
    runs = [replace(one.run, config=one.config, candidates=()) for one in settled]
    fitted: dict[str, float] = dict(begin)
    misses: dict[str, Column] = {}
    measures: dict[str, Measure] = {
        law: lambda run: run.step_seconds,
        "memory": lambda run: run.peak_bytes if law == "gpu" else None,
    }
    for of, measure in measures.items():
        moving = {
            name: replace(
                prior, value=begin[f"{of}.{name}"], spread=prior.spread * spreads.get(name, tight)
            )
            for name, prior in priors(of).items()
            if name not in still and begin[f"{of}.{name}"] > 0 and not prior.fixed
        }
        some = [run for run in runs if measure(run)]
        found, misses[of] = _fit(some, moving, _law(of, begin), measure)
        fitted |= {f"{of}.{name}": value for name, value in found.items()}
    return FittedConstants(
        constants=fitted,
        rows=tuple(sorted(run.key for run in runs)),
        step_spread=interval_half_width(misses[law]),
        memory_spread=interval_half_width(misses["memory"]),
    )


Predicting = Callable[[Sequence[PublishedRun], Mapping[str, float]], Column]
Measure = Callable[[PublishedRun], float | None]


def _law(law: str, begin: Mapping[str, float]) -> Predicting:
    """Predicts runs from constants, those that do not move taken from `begin`."""
    known: dict[tuple[str, ...], RunColumns] = {}

    def predicted(runs: Sequence[PublishedRun], given: Mapping[str, float]) -> Column:
        keys = tuple(run.key for run in runs)
        if keys not in known:
            known[keys] = run_columns(runs, (run.config for run in runs))
        k = {name: given.get(name, begin[f"{law}.{name}"]) for name in priors(law)}
        if law == "memory":
            return peak_bytes(known[keys], k)
        return np.asarray(np.sum(list(LAWS[law](known[keys], k).values()), axis=0), dtype=float)

    return predicted


def _fit(
    runs: Sequence[PublishedRun],
    moving: Mapping[str, ConstantPrior],
    law: Predicting,
    measure: Measure,
) -> tuple[dict[str, float], Column]:
    """Constants, and log(predicted / measured) of runs that were left out in turn."""
    if not runs:
        return {}, np.zeros(0)
    measured = np.array([measure(run) for run in runs], dtype=float)

    def fitted(places: NDArray[np.int64]) -> dict[str, float]:
        some = [runs[at] for at in places]
        return fit_constants(lambda given: law(some, given), measured[places], moving)

    every = np.arange(len(runs))
    misses = np.zeros(len(runs))
    for fold in range(min(FOLDS, len(runs)) if len(runs) > 1 else 0):
        out = every[every % FOLDS == fold]
        guessed = law([runs[at] for at in out], fitted(np.setdiff1d(every, out)))
        misses[out] = np.log(guessed / measured[out])
    return fitted(every), misses


def interval_half_width(misses: Column) -> float:
    """Half of the 80 % interval of log(measured / predicted): what 80 % of the misses stay within.

    A part of a row's worth of an unfitted cluster's spread is mixed in, so that four rows that
    happen to fit promise no more than four rows can.
    """
    wide = P90_Z * UNFITTED_SPREAD
    if not len(misses):
        return wide
    ordered = np.sort(np.abs(misses))
    rank = min(len(ordered) - 1.0, 0.8 * (len(ordered) + 1.0) - 1.0)
    mine = float(np.interp(rank, np.arange(len(ordered)), ordered))
    rows = float(len(ordered))
    return float(np.sqrt((rows * mine**2 + _DOUBT_ROWS * wide**2) / (rows + _DOUBT_ROWS)))
