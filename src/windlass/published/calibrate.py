"""Calibrate: constants of a stack from some of its rows, and how far others lie from them.

Rows are taken evenly from all that there are in the order of their cut and shape, from a place that
the seed decides: no measured number has a say. The interval is what the taken rows miss when each
tenth of them is predicted from the others.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from windlass.cost.formulas import Column
from windlass.published.constants import TENTH, UNFITTED_SPREAD, Prior, before, calibration, priors
from windlass.published.fit import fit
from windlass.published.memory import peak_bytes
from windlass.published.predict import LAWS, columns_of
from windlass.published.run import Run
from windlass.published.stacks import catalogue

FOLDS = 10
_UNSEEN_ROWS = 3.0
"""Rows' worth of doubt, as wide as between unfitted clusters, that is added to what folds miss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """What `fitted/*.toml` says of one stack."""

    constants: Mapping[str, float]
    rows: tuple[str, ...]
    step_spread: float
    memory_spread: float


def taken(runs: Sequence[Run], count: int, seed: int) -> list[Run]:
    """`count` of the runs, spread evenly over their cuts and shapes; all where there are fewer."""
    ordered = sorted(runs, key=_place)
    if len(ordered) <= count:
        return ordered
    start = random.Random(seed).random()
    step = len(ordered) / count
    return [ordered[int((turn + start) * step)] for turn in range(count)]


def _place(run: Run) -> tuple[object, ...]:
    cut, shape = run.cut, run.shape
    return (
        shape.width, shape.heads, cut.tensor, cut.pipeline, cut.again, shape.sequence, cut.micro,
        cut.replicas, shape.layers, run.key,
    )  # fmt: skip


def calibrate(
    stack: str, runs: Sequence[Run], still: frozenset[str], *, tight: Mapping[str, float]
) -> Fitted:
    """The most probable constants of a stack, and its intervals.

    Args:
        stack: its name; priors are those of the stack that it is like, where there is one.
        runs: to fit from.
        still: constants of the law that these runs say nothing of.
        tight: constant -> factor on its prior's spread; of a stack like another all but these
            have half of it.
    """
    law = catalogue().stack(stack).law
    timed = [run for run in runs if run.step_seconds and not run.choices]
    held = [run for run in runs if run.peak_bytes and not run.choices]
    values, misses = _fit(stack, law, timed, still, tight)
    held_values, held_misses = _fit(stack, "memory", held, still, tight)
    return Fitted(
        constants=values | held_values,
        rows=tuple(sorted(run.key for run in runs)),
        step_spread=half_width(misses),
        memory_spread=half_width(held_misses),
    )


def _fit(
    stack: str, law: str, runs: Sequence[Run], still: frozenset[str], tight: Mapping[str, float]
) -> tuple[dict[str, float], Column]:
    """Constants of one law, and log(predicted / measured) of runs that were left out in turn."""
    start = starting(stack)
    if not runs:
        return {}, np.zeros(0)
    moving = {
        name: Prior(
            value=start[f"{law}.{name}"],
            spread=prior.spread * _factor(stack, name, tight),
            about="",
        )
        for name, prior in priors(law).items()
        if name not in still and prior.spread > 0.02 and start[f"{law}.{name}"] > 0
    }
    measured = np.array([_measured(run, law) for run in runs])

    def of(given: Mapping[str, float], some: Sequence[Run]) -> Column:
        k = {name: given.get(name, start[f"{law}.{name}"]) for name in priors(law)}
        columns = columns_of(some, (run.cut for run in some))
        if law == "memory":
            return peak_bytes(columns, k)
        return np.asarray(np.sum(list(LAWS[law](columns, k).values()), axis=0), dtype=float)

    def fitted(some: Sequence[Run], times: Column) -> dict[str, float]:
        columns = columns_of(some, (run.cut for run in some))

        def predicted(given: Mapping[str, float]) -> Column:
            k = {name: given.get(name, start[f"{law}.{name}"]) for name in priors(law)}
            if law == "memory":
                return peak_bytes(columns, k)
            return np.asarray(np.sum(list(LAWS[law](columns, k).values()), axis=0), dtype=float)

        return fit(predicted, times, moving)

    found = fitted(runs, measured)
    misses = np.zeros(len(runs))
    places = np.arange(len(runs))
    for fold in range(min(FOLDS, len(runs))):
        out = places % FOLDS == fold
        kept = [run for run, left in zip(runs, out, strict=True) if not left]
        if not kept:
            continue
        guess = of(
            fitted(kept, measured[~out]), [run for run, left in zip(runs, out, strict=True) if left]
        )
        misses[out] = np.log(guess / measured[out])
    return {f"{law}.{name}": value for name, value in found.items()}, misses


def starting(stack: str) -> dict[str, float]:
    """Where a fit begins: the constants of the stack that this one is like, else priors."""
    known = catalogue().stack(stack)
    begin = before(stack)
    if known.like:
        begin |= {**calibration(known.like).values, **known.taken}
    return begin


def _factor(stack: str, name: str, tight: Mapping[str, float]) -> float:
    known = catalogue().stack(stack)
    return tight.get(name, 0.5 if known.like else 1.0)


def _measured(run: Run, law: str) -> float:
    return float((run.peak_bytes if law == "memory" else run.step_seconds) or 0.0)


def half_width(misses: Column) -> float:
    """Half of the 80 % interval of log(measured / predicted): what 80 % of the misses stay within.

    A few rows' worth of an unfitted cluster's spread is mixed in, so that four rows that happen to
    fit promise no more than four rows can.
    """
    wide = TENTH * UNFITTED_SPREAD
    if not len(misses):
        return wide
    ordered = np.sort(np.abs(misses))
    rank = min(len(ordered) - 1.0, 0.8 * (len(ordered) + 1.0) - 1.0)
    mine = float(np.interp(rank, np.arange(len(ordered)), ordered))
    rows = float(len(ordered))
    return float(
        np.sqrt((rows * mine**2 + _UNSEEN_ROWS * 0.1 * wide**2) / (rows + _UNSEEN_ROWS * 0.1))
    )
