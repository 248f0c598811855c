"""Plans that are given: from a file, as a value, for this machine and for others."""

from pathlib import Path

import pytest

import windlass
from command_line import TINY
from windlass.errors import InputErrors, RequestError
from windlass.schema import Plan

MODEL, *OVERRIDES = TINY
DATA = ("data.tokenizer=byte", "train.evaluate_sequences=4", "train.steps=4")


@pytest.fixture
def file(home: Path) -> Path:
    """The plan file of a model with dials."""
    path = home / "plan.toml"
    windlass.plan(MODEL, *OVERRIDES).plan.save(path)
    return path


def test_a_plan_file_alone_trains_the_same_run_bit_for_bit(home: Path, file: Path) -> None:
    data = (*DATA, f"data.source={home / 'text'}")
    searched = windlass.train(windlass.plan(MODEL, *OVERRIDES, *data), root=home / "runs")
    given = windlass.train(windlass.plan(None, *data, plan=file), root=home / "runs")

    assert given.planned.plan == searched.planned.plan
    assert [(s.loss, s.gradient_norm) for s in given] == [
        (s.loss, s.gradient_norm) for s in searched
    ]


def test_a_plan_of_another_model_is_refused(file: Path) -> None:
    other = Plan.load(file).model_copy(update={"graph": "gpt-tiny@000000000000"})

    with pytest.raises(RequestError, match=r"model `gpt-tiny@0{12}`, but `gpt-tiny .*layers=1"):
        windlass.plan(plan=other)


def test_what_the_plan_decides_cannot_be_overridden(file: Path) -> None:
    with pytest.raises(InputErrors, match=r"`batch\.micro` = 1, but the plan has 2"):
        windlass.plan(None, "batch.micro=1", plan=file)


@pytest.mark.usefixtures("home")
def test_a_plan_is_for_its_own_machine_unless_another_one_is_named() -> None:
    elsewhere = windlass.plan(MODEL, *OVERRIDES, machine="h100", memory="4GiB").plan

    assert windlass.plan(plan=elsewhere).machine.name == "h100"
    moved = windlass.plan(plan=elsewhere, machine="a100-40gb")
    assert moved.machine.name == "a100-40gb"
    assert moved.plan.stages == elsewhere.stages
    (note,) = moved.notes
    assert note.startswith("the plan was made for `h100`")


def test_a_plan_for_a_machine_that_was_measured_again_is_predicted_anew(file: Path) -> None:
    before = windlass.plan(plan=file)
    earlier = before.plan.model_copy(update={"machine": "here@000000000000"})

    after = windlass.plan(plan=earlier)

    assert before.notes == ()
    assert (after.plan, after.prediction) == (before.plan, before.prediction)
    assert after.notes[0].startswith("the plan was made for `here` as it was (000000000000)")
