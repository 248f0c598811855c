"""Asks for the next point of the space; Optuna's samplers, made anew for each question.

What they know of earlier trials comes from the files of the sweep, and each trial has a seed of its
own. So a point follows from the seed, its number and what was known then: a driver that was killed
and started again asks for the same points of a random search, and never for one twice.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from windlass.errors import RequestError
from windlass.sweep.search_space import Choice, Dimension, grid_point
from windlass.sweep.sweep_file import SweepRequest, Trial

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial


def next_point(request: SweepRequest, trials: Iterable[Trial], number: int) -> dict[str, Choice]:
    """The point of the space that a trial tries, by dotted key.

    Args:
        trials: what is known of the other trials.
        number: number of the trial, from 0.

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
