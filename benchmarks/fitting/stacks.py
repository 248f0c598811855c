"""Fits the constants of a stack to some of its rows, with intervals from cross-validation.

Rows are selected evenly in the order of their configuration and shape, starting at a row that the
seed decides, so that measured values have no influence. The interval is the error of each tenth of
these rows when it is predicted from the others.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fitting.least_squares import fit_constants
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
"""Pseudo-rows with the spread of unfitted clusters, added to the errors of the folds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedConstants:
    """Constants and intervals of one stack, as in `fitted/`."""

    constants: Mapping[str, float]
    rows: tuple[str, ...]
    step_spread: float
    memory_spread: float


def calibration_runs(runs: Sequence[PublishedRun], count: int, seed: int) -> list[PublishedRun]:
    """`count` runs, spread evenly over configurations and shapes, or all if there are fewer."""
    ordered = sorted(runs, key=_sort_key)
    if len(ordered) <= count:
        return ordered
    start = random.Random(seed).random()
    step = len(ordered) / count
    return [ordered[int((turn + start) * step)] for turn in range(count)]


def _sort_key(run: PublishedRun) -> tuple[object, ...]:
    cut, shape = run.config, run.shape
    return (
        run.device,
        shape.width, shape.heads, cut.tensor, cut.pipeline, cut.recompute_share, shape.sequence,
        cut.micro, cut.replicas, shape.layers, run.key,
    )  # fmt: skip


def fit_stack(
    stack: str,
    runs: Sequence[PublishedRun],
    start: Mapping[str, float],
    *,
    not_fitted: frozenset[str],
    spread_factors: Mapping[str, float],
    default_spread_factor: float,
) -> FittedConstants:
    """The most probable constants of a stack, and its intervals.

    Args:
        stack: name of the stack.
        runs: runs to fit to; if a run has several candidates, the one that is fastest under `start`
            counts.
        start: `law.name` -> value at which the fit starts, and its prior mean.
        not_fitted: constants of the law that stay at their start values.
        spread_factors: constant -> factor on its prior's spread.
        default_spread_factor: factor on the prior spread of all other constants.
    """
    law = stack_catalog().stack(stack).law
    settled = predict_runs(runs, lambda _: prior_calibration(stack, start))
    runs = [replace(one.run, config=one.config, candidates=()) for one in settled]
    fitted: dict[str, float] = dict(start)
    misses: dict[str, Column] = {}
    measures: dict[str, Measure] = {
        law: lambda run: run.step_seconds,
        "memory": lambda run: run.peak_bytes if law == "gpu" else None,
    }
    for of, measure in measures.items():
        moving = {
            name: replace(
                prior,
                value=start[f"{of}.{name}"],
                spread=prior.spread * spread_factors.get(name, default_spread_factor),
            )
            for name, prior in priors(of).items()
            if name not in not_fitted and start[f"{of}.{name}"] > 0 and not prior.fixed
        }
        some = [run for run in runs if measure(run)]
        found, misses[of] = _fit(some, moving, _law(of, start), measure)
        fitted |= {f"{of}.{name}": value for name, value in found.items()}
    return FittedConstants(
        constants=fitted,
        rows=tuple(sorted(run.key for run in runs)),
        step_spread=interval_half_width(misses[law]),
        memory_spread=interval_half_width(misses["memory"]),
    )


RunPredictor = Callable[[Sequence[PublishedRun], Mapping[str, float]], Column]
Measure = Callable[[PublishedRun], float | None]


def _law(law: str, begin: Mapping[str, float]) -> RunPredictor:
    """A function that predicts runs; constants that are not fitted come from `begin`."""
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
    law: RunPredictor,
    measure: Measure,
) -> tuple[dict[str, float], Column]:
    """Fitted constants, and log(predicted / measured) of runs that were left out in turn."""
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
    """Half width of the 80 % interval of log(measured / predicted).

    A fraction of a row with an unfitted cluster's spread is mixed in, so that a few rows that
    happen to fit do not give a narrow interval.
    """
    wide = P90_Z * UNFITTED_SPREAD
    if not len(misses):
        return wide
    ordered = np.sort(np.abs(misses))
    rank = min(len(ordered) - 1.0, 0.8 * (len(ordered) + 1.0) - 1.0)
    mine = float(np.interp(rank, np.arange(len(ordered)), ordered))
    rows = float(len(ordered))
    return float(np.sqrt((rows * mine**2 + _DOUBT_ROWS * wide**2) / (rows + _DOUBT_ROWS)))
