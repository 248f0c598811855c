"""The pruner: its rules beside Optuna's, and that its answers do not depend on timing."""

import random
from collections.abc import Sequence

import optuna
import pytest
from hypothesis import given, strategies as st
from made_sweeps import made_request

from windlass.sweep.sampler import TrialCurve, decide, rungs
from windlass.sweep.sweep_file import Pruner, SweepRequest

STEPS = 41
Curves = Sequence[Sequence[float]]


def request_of(pruner: Pruner) -> SweepRequest:
    return made_request(pruner=pruner, prune_from=2, prune_every=6)


def pruned_in_turn(request: SweepRequest, curves: Curves) -> list[int | None]:
    """Where each trial is pruned if one runs after another."""
    trials: list[TrialCurve] = []
    for curve in curves:
        trials.append(TrialCurve())
        for rung in rungs(request, STEPS):
            trials[-1].values = {**trials[-1].values, rung: curve[rung]}
            decide(request, trials)
            if trials[-1].pruned_at is not None:
                break
        trials[-1].has_ended = True
    return [trial.pruned_at for trial in trials]


def pruned_at_once(request: SweepRequest, curves: Curves, seed: int) -> list[int | None]:
    """The same if all run at the same time, and come from rung to rung in any order."""
    chance = random.Random(seed)
    trials = [TrialCurve() for _ in curves]
    points = list(rungs(request, STEPS))
    while going := [i for i, one in enumerate(trials) if not one.has_ended]:
        index = chance.choice(going)
        trial = trials[index]
        # A process that is told to stop may have come further by then.
        if len(trial.values) == len(points) or (trial.pruned_at and chance.random() < 0.5):
            trial.has_ended = True
        else:
            rung = points[len(trial.values)]
            trial.values = {**trial.values, rung: curves[index][rung]}
        decide(request, trials)
    return [trial.pruned_at for trial in trials]


@pytest.mark.parametrize("pruner", ["median", "halving"])
@given(
    levels=st.lists(st.floats(0, 10), min_size=1, max_size=12),
    slopes=st.lists(st.floats(-0.2, 0.2), min_size=12, max_size=12),
    seed=st.integers(0, 2**20),
)
def test_what_is_pruned_does_not_depend_on_who_is_faster(
    pruner: Pruner, levels: list[float], slopes: list[float], seed: int
) -> None:
    request = request_of(pruner)
    curves = [
        [level + slope * step for step in range(STEPS)]
        for level, slope in zip(levels, slopes, strict=False)
    ]

    assert pruned_at_once(request, curves, seed) == pruned_in_turn(request, curves)


def pruned_by_optuna(
    pruner: optuna.pruners.BasePruner, request: SweepRequest, curves: Curves
) -> list[int | None]:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(pruner=pruner)
    pruned: list[int | None] = []
    for curve in curves:
        trial = study.ask()
        pruned.append(None)
        for rung in rungs(request, STEPS):
            trial.report(curve[rung], rung)
            if trial.should_prune():
                pruned[-1] = rung
                break
        state = optuna.trial.TrialState.PRUNED if pruned[-1] else None
        study.tell(trial, None if state else curve[-1], state=state)
    return pruned


def falling_curves(count: int) -> Curves:
    chance = random.Random(3)
    levels = [chance.random() for _ in range(count)]
    return [[level + 1 / (step + 1) for step in range(STEPS)] for level in levels]


def test_the_halving_pruner_decides_as_that_of_optuna() -> None:
    request = request_of("halving")
    optunas = optuna.pruners.SuccessiveHalvingPruner(min_resource=2, reduction_factor=4)

    mine = pruned_in_turn(request, falling_curves(40))

    assert mine == pruned_by_optuna(optunas, request, falling_curves(40))
    assert sum(step is not None for step in mine) > 20


def test_the_median_pruner_decides_as_that_of_optuna_at_its_first_rung() -> None:
    # Later ones differ: Optuna compares with finished trials only, ours with all that came there.
    request = made_request(pruner="median", prune_from=2, prune_every=STEPS)
    curves = falling_curves(5)
    curves = sorted(curves, key=lambda curve: -curve[0])[:4] + list(curves)

    optunas = optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=2)
    mine = pruned_in_turn(request, curves)

    first = mine.index(2)
    assert mine[: first + 1] == pruned_by_optuna(optunas, request, curves)[: first + 1]


def test_a_value_that_is_no_number_is_pruned_and_compared_with_none() -> None:
    request = request_of("median")
    curves = [[1.0] * STEPS] * 4 + [[float("nan")] * STEPS] + [[0.9] * STEPS, [1.1] * STEPS]

    assert pruned_in_turn(request, curves) == [None, None, None, None, 2, None, 2]
