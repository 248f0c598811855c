"""A plan is handed to another engine: its configuration, what starts it, and what is predicted."""

import json
import subprocess
from pathlib import Path

import pytest

import windlass
from engine_log_texts import megatron
from engine_plans import make_plan
from windlass import api
from windlass.errors import InputErrors, RequestError
from windlass.schema import Plan


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    """A plan that Megatron can say, and torchtitan cannot: it shards optimizer state alone."""
    path = tmp_path / "plan.toml"
    plan = make_plan(stack="windlass", tensor=2, sharding=(1, 4))
    plan.model_copy(update={"stack": None}).save(path)
    return path


def test_a_folder_has_the_configuration_its_script_the_plan_and_the_prediction(
    plan_file: Path, tmp_path: Path
) -> None:
    made = windlass.export(plan_file, to="megatron-lm", output=tmp_path / "out")

    names = {path.name for path in made.folder.iterdir()}
    assert names == {"train.args", "launch.sh", "plan.toml", "prediction.json", "translation.md"}
    predicted = json.loads((made.folder / "prediction.json").read_text())
    step = predicted["step_seconds"]
    assert step["low"] < step["predicted"] < step["high"]
    assert "predicted, not measured" in predicted["all_numbers_are"]
    page = (made.folder / "translation.md").read_text()
    assert "| `parallel.tensor` | 2 | `tensor-model-parallel-size` = 2 |" in page
    assert Plan.load(made.folder / "plan.toml") == made.plan


def test_the_script_starts_torchrun_with_every_word_of_the_configuration(
    plan_file: Path, tmp_path: Path
) -> None:
    made = windlass.export(plan_file, to="megatron-lm", output=tmp_path / "out")
    torchrun = tmp_path / "torchrun"
    torchrun.write_text('#!/bin/sh\nfor word in "$@"; do echo "$word"; done\n')
    torchrun.chmod(0o755)

    run = subprocess.run(
        ("sh", made.start), capture_output=True, text=True, check=True,
        env={"TORCHRUN": str(torchrun), "MEGATRON": "/clone", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip

    words = run.stdout.splitlines()
    assert words[:5] == ["--nnodes", "1", "--nproc-per-node", "8", "/clone/pretrain_gpt.py"]
    assert words[5:] == (made.folder / "train.args").read_text().splitlines()


def test_what_the_engine_cannot_say_is_refused_with_the_price_of_the_nearest(
    plan_file: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputErrors) as error:
        windlass.export(plan_file, to="torchtitan", output=tmp_path / "out")

    text = str(error.value)
    assert "`sharding.optimizer` = 4, but `torchtitan` has no sharding of optimizer state" in text
    assert "the nearest plan that `torchtitan` can run has" in text
    assert " a step" in text
    assert "`--nearest` takes it" in text
    assert not (tmp_path / "out").exists()


def test_the_nearest_plan_is_written_where_it_is_asked_for(plan_file: Path, tmp_path: Path) -> None:
    made = windlass.export(plan_file, to="torchtitan", output=tmp_path / "out", nearest=True)

    assert made.plan.sharding.parameters == 4
    assert any("sharding of optimizer state" in each for each in made.changes)
    assert "written instead" in (made.folder / "translation.md").read_text()


def test_weights_have_no_nearest_plan_and_plans_no_masks(plan_file: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="is for the plan of an engine"):
        windlass.export("last", to="hf:somewhere", nearest=True)
    with pytest.raises(RequestError, match="name its folder by `-o DIR`"):
        windlass.export(plan_file, to="torchtitan")
    with pytest.raises(RequestError, match="writes no weights"):
        windlass.export(plan_file, to="torchtitan", output=tmp_path, ema=True)


def test_a_configuration_is_read_into_the_plan_that_it_was_written_from(
    plan_file: Path, tmp_path: Path
) -> None:
    made = windlass.export(plan_file, to="megatron-lm", output=tmp_path / "out")

    read, unread = api.plan_of_config(
        made.folder, "megatron-lm", model="llama3-8b", machine="dgx-h100:1"
    )

    assert read == made.plan
    assert not unread


def test_a_log_becomes_a_run_with_a_prediction(plan_file: Path, tmp_path: Path) -> None:
    made = windlass.export(plan_file, to="megatron-lm", output=tmp_path / "out")
    step = made.prediction.step_seconds
    log = tmp_path / "slurm.out"
    log.write_text("".join(megatron(number, 1100 * step) for number in range(1, 40)))

    run = windlass.adopt(log, stack="megatron-lm", plan=made.folder, root=tmp_path / "runs")
    again = windlass.adopt(log, stack="megatron-lm", plan=made.folder, root=tmp_path / "runs")

    assert (run.steps, run.change, again.change) == (39, "new", "unchanged")
    assert run.seconds == pytest.approx(1.1 * step, rel=1e-2)
    assert run.predicted_seconds == pytest.approx(step)
    record = windlass.load(run.folder, root=tmp_path / "runs")
    assert record.plan == made.plan
    (row,) = windlass.runs(root=tmp_path / "runs")
    assert row.predicted_seconds == pytest.approx(step)


def test_an_adopted_run_is_judged_by_its_prediction(plan_file: Path, tmp_path: Path) -> None:
    made = windlass.export(plan_file, to="megatron-lm", output=tmp_path / "out")
    log = tmp_path / "slow.out"
    slow = 3000 * made.prediction.step_seconds
    log.write_text("".join(megatron(number, slow + number % 3) for number in range(1, 60)))
    run = windlass.adopt(log, stack="megatron-lm", plan=made.folder, root=tmp_path / "runs")

    verdict = windlass.judge(run.folder, root=tmp_path / "runs")

    assert any("times what was predicted" in each for each in verdict.sentences)
