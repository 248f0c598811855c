"""What a sweep has found: the best trials, and how much each key matters."""

import random

import optuna
from made_sweeps import made_request

from windlass.sweep.run_values import best_trials, importance, ranked_trials
from windlass.sweep.sweep_file import Trial

REQUEST = made_request(space={"rate": "1e-4..1e-2:log", "kind": "a,b,c", "seed": "1..5"})


def finished(number: int, values: tuple[float, ...], **params: object) -> Trial:
    return Trial(number=number, params=params, run="", state="finished", values=values)


def searched(count: int) -> list[Trial]:
    """A valley over the logarithm of the rate, a small step of the kind, and no influence else."""
    chance = random.Random(1)
    trials = []
    for number in range(count):
        rate, kind = 10 ** chance.uniform(-4, -2), chance.choice("abc")
        loss = (
            abs(REQUEST.dimensions()[0].position(rate) - 0.4)
            + 0.1 * (kind == "b")
            + chance.gauss(0, 0.02)
        )
        trials.append(finished(number, (loss,), rate=rate, kind=kind, seed=chance.randint(1, 5)))
    return trials


def test_a_key_counts_also_if_its_middle_is_best() -> None:
    shares = importance(REQUEST, searched(80))

    assert list(shares) == ["rate", "kind", "seed"]
    assert shares["rate"] > 0.5
    assert shares["seed"] < 0.1


def test_the_order_of_importance_is_that_of_optunas_ped_anova() -> None:
    trials = searched(80)
    distributions = {
        "rate": optuna.distributions.FloatDistribution(1e-4, 1e-2, log=True),
        "kind": optuna.distributions.CategoricalDistribution(("a", "b", "c")),
        "seed": optuna.distributions.IntDistribution(1, 5),
    }
    study = optuna.create_study()
    for trial in trials:
        study.add_trial(
            optuna.trial.create_trial(
                values=trial.values, params=trial.params, distributions=distributions
            )
        )
    evaluator = optuna.importance.PedAnovaImportanceEvaluator()

    theirs = evaluator.evaluate(study)

    assert list(importance(REQUEST, trials)) == list(theirs)


def test_nothing_is_said_of_few_trials() -> None:
    assert importance(REQUEST, searched(7)) == {}


def test_the_best_of_several_objectives_are_those_that_none_beats() -> None:
    request = made_request(objectives=("loss", "max:accuracy"))
    values = [(1.0, 0.5), (2.0, 0.9), (2.0, 0.8), (3.0, 0.9)]
    trials = [finished(number, value) for number, value in enumerate(values)]

    assert [trial.number for trial in best_trials(request, trials)] == [0, 1]


def test_pruned_trials_come_behind_finished_ones_the_furthest_first() -> None:
    pruned = {"state": "pruned", "reason": "worse than others"}
    trials = [
        finished(0, (3.0,)),
        finished(1, (1.0,)).model_copy(update={**pruned, "pruned_at": 10}),
        finished(2, (2.0,)).model_copy(update={**pruned, "pruned_at": 20}),
        finished(3, (2.5,)),
        Trial(number=4, params={}, run="", state="failed"),
    ]

    assert [trial.number for trial in ranked_trials(made_request(), trials)] == [3, 0, 2, 1]
