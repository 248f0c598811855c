"""`windlass train`, `resume` and `sample`, as a user runs them."""

import json
import math
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from cli.rank_processes import numbers, wait_for_step, weights
from command_line import TINY, Windlass, start
from task_files import task_file
from windlass.api import Run, make_request, plan, resume, train
from windlass.errors import RunInterrupted
from windlass.runtime.checkpoint.checkpoint import latest_checkpoint
from windlass.tracking.run_reader import load_run


def test_a_run_is_planned_predicted_recorded_and_names_the_next_commands(
    windlass: Windlass, tmp_path: Path
) -> None:
    imports = {"PYTHONPROFILEIMPORTTIME": "1"}
    done = windlass("train", *TINY, "train.steps=6", "--folder", "run", env=imports)

    assert done.returncode == 0, done.stderr
    # Its import takes half a second, and is for compilation only.
    assert not re.search(r"\btorch\._dynamo$", done.stderr, re.MULTILINE)
    for words in ("predicted", "report", "windlass sample run"):
        assert words in done.stdout
    record = load_run(tmp_path / "run")
    assert record.state == "finished"
    assert [step.step for step in record.steps] == [1, 2, 3, 4, 5, 6]
    assert record.faults == ()
    parts = (
        record.request,
        record.plan,
        record.prediction,
        record.environment,
        record.measured_timeline,
    )
    assert all(parts)
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000
    traced = windlass("report", "run", "--trace", "trace.json")
    assert traced.returncode == 0, traced.stderr
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    processes = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {"predicted", "measured"}
    again = windlass("sample", "run", "--prompt", "def ", "--tokens", "8")
    assert again.returncode == 0, again.stderr
    assert again.stdout.startswith("def ")
    task_file(tmp_path, "names", [{"context": "def ", "target": "main"}] * 2)
    scored = windlass("evaluate", "run", "names.yaml")
    assert scored.returncode == 0, scored.stderr
    row = re.search(r"6 +names +0 +perplexity +\d+\.\d{4} +± \d+\.\d{4}", scored.stdout)
    assert row, scored.stdout
    assert row[0] in windlass("show", "run").stdout


@pytest.mark.parametrize(
    "more",
    [
        pytest.param((), id="in memory", marks=pytest.mark.slow),
        pytest.param(("phases=3",), id="in phases"),
    ],
)
def test_an_interrupted_run_saves_exits_130_and_resumes_bit_for_bit(
    surroundings: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    more: tuple[str, ...],
) -> None:
    # It would take minutes, so that the signal never comes too late; nothing takes all its steps.
    words = (*TINY, *more, "train.steps=9999", "train.evaluate_every=9999", "train.save_every=9999")
    folder, whole = tmp_path / "stopped", tmp_path / "whole"
    process = start(surroundings, tmp_path, "train", *words, "--folder", "stopped")
    wait_for_step(folder, 2)
    process.send_signal(signal.SIGINT)
    _, news = process.communicate(timeout=60)

    assert process.returncode == 130, news
    assert "windlass resume stopped" in news
    record = load_run(folder)
    assert record.state == "interrupted"
    done = record.steps[-1].step
    assert latest_checkpoint(folder / "checkpoints").manifest.step == done

    monkeypatch.setenv("XDG_CACHE_HOME", surroundings["XDG_CACHE_HOME"])
    monkeypatch.chdir(tmp_path)
    take_steps(done + 3, partial(resume, folder, root=tmp_path))
    planned = plan(make_request(None, file=folder / "request.toml"), plan=folder / "plan.toml")
    take_steps(done + 3, partial(train, planned, folder=whole))
    stopped = load_run(folder)
    assert stopped.attempts == 2
    assert numbers(stopped) == numbers(load_run(whole))
    assert len(stopped.steps) == done + 3
    assert weights(folder) == weights(whole)


def take_steps(last: int, begin: Callable[..., Run]) -> None:
    """Takes the steps of a run up to `last`, then stops it, so that it saves."""
    steps = [0]
    with suppress(RunInterrupted):
        for step in begin(stop=lambda: steps[-1] >= last):
            steps.append(step.step)  # noqa: PERF401  the run asks for it meanwhile


def test_a_loss_that_is_nan_ends_the_run_and_names_its_step_and_text_files(
    windlass: Windlass, tmp_path: Path
) -> None:
    done = windlass("train", *TINY, "train.steps=20", "train.learning_rate=1e38",
                    "train.save_every=1", "train.clip=1e30", "--folder", "run")  # fmt: skip

    assert done.returncode == 1, done.stderr
    assert "step" in done.stderr
    assert ".py" in done.stderr
    assert "last good checkpoint" in done.stderr
    assert load_run(tmp_path / "run").state == "broken"
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_second_run_in_the_same_folder_is_refused_and_the_first_continues(
    refused: Windlass, surroundings: dict[str, str], tmp_path: Path
) -> None:
    words = ("train", *TINY, "train.steps=2000", "--folder", "run")
    process = start(surroundings, tmp_path, *words)
    wait_for_step(tmp_path / "run", 1)

    second = refused(*words)
    resumed = refused("resume", "run", "--runs", ".")

    assert second.returncode == resumed.returncode == 2
    assert str(process.pid) in resumed.stderr
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 130


def test_a_checkpoint_with_a_flipped_byte_is_reported_and_the_previous_one_is_used(
    windlass: Windlass, tmp_path: Path
) -> None:
    words = (*TINY, "train.steps=30", "train.save_every=10", "train.keep=3")
    assert windlass("train", *words, "--folder", "whole").returncode == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    expected = weights(tmp_path / "whole")
    newest = max((tmp_path / "run" / "checkpoints").glob("step-*"))
    file = max(newest.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)

    done = windlass("resume", "run", "--runs", ".")

    assert done.returncode == 0, done.stderr
    assert file.name in done.stderr
    record = load_run(tmp_path / "run")
    assert numbers(record) == numbers(load_run(tmp_path / "whole"))
    assert weights(tmp_path / "run") == expected


def test_a_disk_that_fills_up_during_a_save_is_one_message_and_keeps_the_last_good_checkpoint(
    windlass: Windlass, tmp_path: Path
) -> None:
    # A block's weights and moments have 38 MB; all that is recorded before has less than 2 MiB.
    words = (*TINY, "model.width=512", "train.steps=40", "train.save_every=2")
    most_bytes = 4 * 2**20

    done = windlass("train", *words, "--folder", "run", file_bytes=most_bytes)

    assert done.returncode == 2, done.stderr
    assert "no space left" in done.stderr
    assert "Traceback" not in done.stderr
    left = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert not any("tmp" in name for name in left)


def test_a_users_own_model_starts_with_the_weights_that_its_code_makes(
    windlass: Windlass, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(
        "from torch import nn\n"
        "def build():\n"
        "    head = nn.Linear(16, 257)\n"
        "    nn.init.zeros_(head.weight)\n"
        "    nn.init.zeros_(head.bias)\n"
        "    return nn.Sequential(nn.Embedding(257, 16), nn.Linear(16, 16), head)\n"
    )
    words = ("own.py:build", "data.tokenizer=byte", "train.sequence=32", "train.batch=4")
    more = ("precision=float32", "compile=false", "train.steps=1", "train.evaluate_sequences=4")

    done = windlass("train", *words, *more, "--folder", "run")

    assert done.returncode == 0, done.stderr
    # Logits of zero give every token the same probability.
    assert load_run(tmp_path / "run").steps[0].loss == pytest.approx(math.log(257), rel=1e-6)


@pytest.mark.slow
def test_twenty_kills_at_random_moments_lose_nothing(
    windlass: Windlass, surroundings: dict[str, str], tmp_path: Path
) -> None:
    words = (*TINY, "train.steps=800", "train.evaluate_every=50", "train.save_every=8")
    assert windlass("train", *words, "--folder", "whole").returncode == 0
    folder = tmp_path / "killed"
    verb: tuple[str, ...] = ("train", *words, "--folder", "killed")
    draw = random.Random()
    kills = 0
    for turn in range(20):
        process = start(surroundings, tmp_path, *verb)
        if turn % 4 == 3:
            time.sleep(draw.uniform(0.1, 3.0))  # during start-up, or soon after it
        else:
            done = len(load_run(folder).steps) if (folder / "id").exists() else 0
            # Saving takes most of a step here, so most of these kills fall into a save.
            wait_for_step(folder, done + draw.randint(1, 24))
            time.sleep(draw.uniform(0, 0.05))
        kills += process.poll() is None
        process.kill()
        process.communicate(timeout=60)
        if (folder / "id").exists():
            verb = ("resume", "killed", "--runs", ".")

    final = windlass(*verb)

    assert kills == 20
    assert final.returncode == 0, final.stderr
    assert numbers(load_run(folder)) == numbers(load_run(tmp_path / "whole"))
    assert weights(folder) == weights(tmp_path / "whole")


def test_check_verifies_a_run_in_phases_bit_for_bit_and_by_pytorch(windlass: Windlass) -> None:
    done = windlass("check", *TINY, "phases=3", "--json")

    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["equal"]
    assert len(told["plan"]["stages"][0]["phases"]) == 3
    assert {each["tolerance"] for each in told["verification"]["comparisons"]} == {0.0}
    assert {each["quantity"] for each in told["plain_pytorch"]["comparisons"]} >= {
        "learning rate", "tokens", "loss", "gradient norm", "weight", "held-out loss",
    }  # fmt: skip


def test_resume_of_a_finished_run_has_nothing_to_do_and_is_no_fault(windlass: Windlass) -> None:
    assert windlass("train", *TINY, "train.steps=2", "--folder", "run").returncode == 0
    done = windlass("resume", "run", "--runs", ".")
    assert done.returncode == 0, done.stderr
    assert "has finished all its 2 steps; `windlass train --from run --continue" in done.stderr
