"""Runs are listed fast and found by whatever a person would type."""

from dataclasses import replace
from pathlib import Path

import pytest

from windlass.errors import RecordError
from windlass.schema.run_record import Step
from windlass.tracking.run_folder import RunFolder, create_run_folder, reopen_run_folder
from windlass.tracking.run_index import find_run, list_runs


def make(root: Path, name: str = "gpt-tiny", *, steps: int = 5) -> RunFolder:
    meta = {"model": name, "machine": "here", "steps": 100, "predicted_seconds": 0.4}
    run = create_run_folder(root, name, documents={}, meta=meta)
    for number in range(1, steps + 1):
        run.append_step(step(number))
    return run


def step(number: int) -> Step:
    return Step(
        step=number, loss=9.0 / number, gradient_norm=1.0, learning_rate=1e-3, tokens=512,
        seconds=0.5, memory_bytes=2**30, held_out_loss=5.0 if number % 5 == 0 else None,
    )  # fmt: skip


def test_the_list_shows_state_steps_and_losses(tmp_path: Path):
    make(tmp_path).end("finished")
    killed = make(tmp_path, "gpt2-124m", steps=2)
    killed.close()
    running = make(tmp_path, steps=0)
    newest, middle, oldest = list_runs(tmp_path)
    running.close()
    assert (oldest.state, middle.state, newest.state) == ("finished", "killed", "running")
    assert (oldest.step, oldest.steps, oldest.loss, oldest.held_out_loss) == (5, 100, 1.8, 5.0)
    assert (middle.model, middle.machine, middle.attempts) == ("gpt2-124m", "here", 1)
    assert (middle.seconds, middle.predicted_seconds) == (0.5, 0.4)
    assert (newest.step, newest.short_id) == (0, running.id[-6:])


def test_a_long_finished_run_shows_its_last_held_out_loss(tmp_path: Path):
    make(tmp_path, steps=6).end("finished")
    long = make(tmp_path, steps=5)
    for number in range(6, 1000):
        long.append_step(replace(step(number), held_out_loss=None))
    long.end("finished")
    assert [(run.step, run.held_out_loss) for run in list_runs(tmp_path)] == [(999, 5.0), (6, 5.0)]


def test_the_state_of_a_run_is_that_of_its_last_attempt(tmp_path: Path):
    first = make(tmp_path)
    first.end("interrupted")
    assert list_runs(tmp_path)[0].state == "interrupted"
    second = reopen_run_folder(first.path, meta={})
    second.append_step(step(6))
    second.end("finished")
    (run,) = list_runs(tmp_path)
    assert (run.state, run.step, run.attempts) == ("finished", 6, 2)


def test_folders_without_a_run_are_left_out_of_the_list(tmp_path: Path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "file").write_text("x")
    make(tmp_path).end("finished")
    assert len(list_runs(tmp_path)) == 1
    assert list_runs(tmp_path / "nothing") == ()


def test_a_run_is_found_by_path_name_id_their_beginnings_and_last(tmp_path: Path):
    first, second = make(tmp_path), make(tmp_path, "gpt2-124m")
    for run in (first, second):
        run.end("finished")
        for text in (str(run.path), run.path.name, run.id, run.id[-6:], run.path.name[:-1]):
            assert find_run(tmp_path, text) == run.path
    assert find_run(tmp_path, "last") == second.path


def test_a_query_that_matches_several_runs_names_them(tmp_path: Path):
    first, second = make(tmp_path), make(tmp_path)
    first.close()
    second.close()
    with pytest.raises(RecordError, match=r"means 2 runs: .*write more of the name"):
        find_run(tmp_path, first.path.name[:12])


def test_a_misspelt_name_is_answered_with_the_nearest_name(tmp_path: Path):
    run = make(tmp_path)
    run.close()
    wrong = run.path.name.replace("tiny", "tinny")
    with pytest.raises(RecordError, match=rf"no run `{wrong}`.*did you mean `{run.path.name}`"):
        find_run(tmp_path, wrong)


def test_a_run_folder_elsewhere_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    create_run_folder(
        tmp_path, "gpt", documents={}, meta={}, folder=tmp_path / "here" / "mine"
    ).close()
    monkeypatch.chdir(tmp_path / "here")
    assert find_run(tmp_path / "runs", "mine") == Path("mine")


def test_an_empty_root_says_how_to_start_a_run(tmp_path: Path):
    with pytest.raises(RecordError, match=r"no run in .*start one with `windlass train`"):
        find_run(tmp_path, "last")
    with pytest.raises(RecordError, match="holds no run"):
        find_run(tmp_path, str(tmp_path / "nothing"))
