"""What a sweep asks for next: from its files alone, the same for every driver."""

import subprocess
import sys

from made_sweeps import made_request

from windlass.sweep.sampler import _distribution, _told, next_point
from windlass.sweep.sweep_file import SweepRequest, Trial

SPACE = {
    "train.learning_rate": "1e-4..1e-2:log", "train.seed": "1..5",
    "train.betas": [[0.9, 0.95], [0.9, 0.99]],
}  # fmt: skip


def finished(request: SweepRequest, number: int, **changes: object) -> Trial:
    params = next_point(made_request(space=request.space, sampler="random"), (), number)
    loss = abs(float(str(params["train.learning_rate"])) - 3e-3)
    fields = {"state": "finished", "values": (loss,), **changes}
    return Trial(number=number, params=params, run=f"run-{number}").model_copy(update=fields)


def test_a_random_search_asks_for_the_same_points_again_and_for_none_twice() -> None:
    request = made_request(space=SPACE)

    points = [next_point(request, (), number) for number in range(20)]

    told = [finished(request, number) for number in range(5)]
    assert points == [next_point(request, told, number) for number in range(20)]
    assert len({point["train.learning_rate"] for point in points}) == 20


def test_tpe_asks_nearer_to_the_best_than_chance() -> None:
    request = made_request(space={"train.learning_rate": "1e-4..1e-2:log"}, sampler="tpe")
    trials = [finished(request, number) for number in range(20)]

    rates = [next_point(request, trials, number)["train.learning_rate"] for number in range(20, 40)]

    near = [rate for rate in rates if 1.5e-3 < float(str(rate)) < 6e-3]
    assert len(near) >= 12, "chance gives 6 of 20"


def test_tpe_learns_from_pruned_and_knows_of_running_trials() -> None:
    request = made_request(space=SPACE, sampler="tpe")
    trials = [finished(request, number) for number in range(12)]
    more = [
        finished(request, 12, state="pruned", pruned_at=10),
        finished(request, 13, state="running", values=()),
        finished(request, 14, state="failed", values=()),
    ]

    assert next_point(request, trials + more, 15) == next_point(request, more + trials, 15)
    assert next_point(request, trials, 15) != next_point(request, trials + more, 15)


def test_optuna_is_told_of_trials_that_failed() -> None:
    from optuna.trial import TrialState

    request = made_request(space=SPACE, sampler="tpe")
    space = request.dimensions()
    distributions = {dimension.key: _distribution(dimension) for dimension in space}

    told = _told(finished(request, 3, state="failed", values=()), space, distributions)

    assert told is not None
    assert told.state == TrialState.FAIL
    assert told.params.keys() == SPACE.keys()


def test_several_objectives_are_told_with_their_directions() -> None:
    request = made_request(space=SPACE, sampler="tpe", objectives=("loss", "max:accuracy"))
    trials = [finished(request, n, values=(n / 20, 1 - n / 20)) for n in range(12)]

    assert next_point(request, trials, 12).keys() == SPACE.keys()


def test_runs_and_grids_import_no_optuna() -> None:
    code = (
        "import sys; import windlass.experiments.sweeping.trial_process;"
        "from windlass.sweep.sampler import _distribution, _told, next_point;"
        "from windlass.sweep import SweepRequest;"
        "next_point(SweepRequest(name='a', space={'train.seed': '1..2'}, sampler='grid'), (), 0);"
        "assert 'optuna' not in sys.modules; assert 'torch' not in sys.modules"
    )
    subprocess.run((sys.executable, "-c", code), check=True)
