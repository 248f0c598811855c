"""What a command line or a file asks a sweep to search."""

from pathlib import Path

import pytest

import windlass
from factories import tiny_machine
from windlass.errors import InputErrors, RequestError
from windlass.experiments.sweeping.sweep import make_sweep_request
from windlass.experiments.sweeping.trial_plan import share_of


def test_the_same_words_are_the_same_sweep() -> None:
    words = ("gpt-tiny", "learning_rate=1e-4..1e-2:log", "train.steps=50")

    one, again = make_sweep_request(*words), make_sweep_request(*words, trials=40, jobs=2)

    assert one.name == again.name
    assert one.space == {"train.learning_rate": "1e-4..1e-2:log"}
    assert one.request == {"model.name": "gpt-tiny", "train.steps": 50}
    assert make_sweep_request(*words, seed=1).name != one.name


def test_a_small_finite_space_is_a_grid_of_all_its_points() -> None:
    small = make_sweep_request("gpt-tiny", "train.seed=1..5", "model.layers=2,4")
    fewer = make_sweep_request("gpt-tiny", "train.seed=1..5", "model.layers=2,4", trials=4)
    real = make_sweep_request("gpt-tiny", "train.learning_rate=0.001..0.01")

    assert (small.sampler, small.trials) == ("grid", 10)
    assert (fewer.sampler, fewer.trials) == ("tpe", 4)
    assert (real.sampler, real.trials) == ("tpe", 20)


def test_a_file_says_the_same_as_a_command_line(tmp_path: Path) -> None:
    file = tmp_path / "rates.toml"
    file.write_text(
        'objectives = ["held_out_loss"]\npruner = "median"\n'
        '[request]\nmodel.name = "gpt-tiny"\ntrain.steps = 50\n'
        '[space]\ntrain.learning_rate = "1e-4..1e-2:log"\n'
        "train.betas = [[0.9, 0.95], [0.9, 0.99]]\n"
    )

    request = make_sweep_request(file, "train.steps=80", trials=7)

    assert (request.name, request.trials, request.pruner) == ("rates", 7, "median")
    assert request.request == {"model.name": "gpt-tiny", "train.steps": 80}
    point = {"train.learning_rate": 0.001, "train.betas": (0.9, 0.99)}
    resolved = windlass.make_request(None, *request.overrides(point))
    assert (resolved.train.steps, resolved.train.betas) == (80, (0.9, 0.99))


def test_all_values_of_the_space_that_no_request_takes_are_refused_at_once() -> None:
    with pytest.raises(InputErrors) as caught:
        make_sweep_request("gpt-tiny", "train.learning_rat=1e-4..1e-2", "precision=float32,int3")

    told = str(caught.value)
    assert "did you mean `train.learning_rate`" in told
    assert "int3" in told


@pytest.mark.parametrize(
    ("words", "settings", "told"),
    [
        (("gpt-tiny",), {}, "give a key a range or choices"),
        (("gpt-tiny", "train.seed=5..1"), {}, "above the upper end"),
        (("gpt-tiny", "train.seed=1..5"), {"sampler": "tp"}, "sampler"),
        (("gpt-tiny", "train.seed=1..5"), {"name": "../x"}, "name"),
        (
            ("gpt-tiny", "train.seed=1..5"),
            {"objectives": ("loss", "seconds"), "pruner": "median"},
            "a pruner compares by one",
        ),
        (("none.toml",), {}, "no file `none.toml`"),
    ],
)
def test_a_search_that_is_none_is_refused(
    words: tuple[str, ...], settings: dict[str, object], told: str
) -> None:
    with pytest.raises((InputErrors, RequestError), match=told):
        make_sweep_request(*words, **settings)  # type: ignore[misc]


def test_a_job_has_its_share_of_the_cores_and_all_of_the_memory() -> None:
    machine = tiny_machine(memory="8 GiB")

    share = share_of(machine, 4)

    assert share.device.memory.capacity_bytes == machine.device.memory.capacity_bytes
    assert share.device.matmul[0].peak == machine.device.matmul[0].peak / 4
    assert share_of(machine, 1) == machine


def test_an_arm_is_a_set_of_keys_that_is_tried_as_a_whole(tmp_path: Path) -> None:
    file = tmp_path / "arms.toml"
    file.write_text(
        '[request]\nmodel.name = "gpt-tiny"\ntrain.steps = 50\n'
        '[space]\ntrain.seed = "1..2"\n'
        "[arms.deep]\nmodel.layers = 8\nmodel.width = 96\n[arms.wide]\nmodel.width = 384\n"
    )

    request = make_sweep_request(file)

    assert (request.sampler, request.trials) == ("grid", 4)
    resolved = windlass.make_request(None, *request.overrides({"train.seed": 2, "arm": "deep"}))
    assert (resolved.model.layers, resolved.model.width, resolved.train.seed) == (8, 96, 2)
    with pytest.raises(InputErrors, match=r"`model.width` is in `arms` and in `space`"):
        make_sweep_request(file, "model.width=64,128")
