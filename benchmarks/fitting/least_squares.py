"""Fits constants to measured runs by damped least squares on logarithms, with priors.

It minimizes the sum of Huber's loss of log(predicted / measured) over a run's own noise,
and of the squares of each constant's distance from its prior in the prior's spreads: the most
probable constants. Runs that were disturbed therefore pull with a force that does not grow.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.float64]


class Prior(NamedTuple):
    """Prior distribution of a constant."""

    value: float
    spread: float
    """Standard deviation of its logarithm."""


_NOISE = 0.05
"""Assumed standard deviation of log(measured / predicted) of a single run."""
_HUBER = 1.2
"""Standard deviations beyond which the loss is linear (1.345 is usual; outliers are many here)."""
_STEPS = 12
_SMALL = 1e-2
_DAMPING = (1e-3, 5.0, 10)


class Fit(NamedTuple):
    """Fitted constants."""

    constants: dict[str, float]
    leverages: Column
    """How far a run's prediction follows its own measured value, 0 to 1, `[run]`."""


Law = Callable[[Mapping[str, float]], Column]


def fit_constants(law: Law, measured: Column, prior: Mapping[str, Prior]) -> Fit:
    """The most probable constants.

    Args:
        law: predicts the measured values from constants.
        measured: positive values [run].
        prior: prior of each constant that is fitted.

    Returns:
        A value for each constant of `prior`, and the runs' leverages.
    """
    names = list(prior)
    start = np.array([prior[name].value for name in names])
    spread = np.array([prior[name].spread for name in names])
    goal = np.log(measured)

    def values(moved: Column) -> dict[str, float]:
        return dict(zip(names, (start * np.exp(moved)).tolist(), strict=True))

    def misses(moved: Column) -> Column:
        return np.asarray((np.log(law(values(moved))) - goal) / _NOISE, dtype=float)

    def loss(moved: Column) -> float:
        size = np.abs(misses(moved))
        robust = np.where(size < _HUBER, size**2 / 2, _HUBER * (size - _HUBER / 2))
        return float(robust.sum() + ((moved / spread) ** 2).sum() / 2)

    def tangent(moved: Column) -> tuple[Column, Column, Column]:
        """Misses, their slopes [run, constant], and the curvature of the loss."""
        here = misses(moved)
        slopes = np.stack(
            [(misses(moved + _SMALL * axis) - here) / _SMALL for axis in np.eye(len(names))], axis=1
        )
        weighted = slopes * np.minimum(1.0, _HUBER / np.maximum(np.abs(here), 1e-12))[:, None]
        return here, weighted, weighted.T @ slopes + np.diag(spread**-2)

    moved, now = np.zeros(len(names)), loss(np.zeros(len(names)))
    damping, factor, tries = _DAMPING
    for _ in range(_STEPS):
        here, slopes, curvature = tangent(moved)
        downhill = slopes.T @ here + moved / spread**2
        for _ in range(tries):
            step = -np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), downhill)
            then = loss(moved + step)
            if then < now:
                break
            damping *= factor
        else:
            break
        gained, moved, now = now - then, moved + step, then
        damping = max(damping / factor, 1e-9)
        if gained < 1e-3 * now:
            break
    # Slopes are weighted once in `tangent`; a leverage of a disturbed run is smaller twice over.
    _, slopes, curvature = tangent(moved)
    pulls = np.einsum("rc,cd,rd->r", slopes, np.linalg.inv(curvature), slopes)
    return Fit(values(moved), pulls)
