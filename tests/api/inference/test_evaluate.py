"""A trained run answers the questions of a task."""

import sys
from pathlib import Path

import pytest

import windlass
from command_line import TINY
from task_files import SUMS, task_file
from windlass.errors import CheckpointError, RequestError
from windlass.schema import TaskScore


def made_run(home: Path, *words: str) -> Path:
    text = f"data.source={home / 'text'}"
    planned = windlass.plan(*TINY, text, "train.steps=12", "train.save_every=6", *words)
    run = windlass.train(planned, root=home / "runs")
    list(run)
    return run.folder


def test_a_run_is_scored_on_a_task_from_any_of_its_checkpoints(home: Path) -> None:
    run = made_run(home)
    shots = {"fewshot_split": "test", "fewshot_config": {"sampler": "first_n"}}
    sums = task_file(home / "tasks", "sums", SUMS, **shots)
    text = task_file(home / "tasks", "text", [{"text": "3 times 3 is 9"}])

    late = windlass.evaluate(run, sums, text)
    early = windlass.evaluate(run, f"{sums},{text}", step=6)

    assert windlass.load(run).evaluations == (*early, *late)
    assert [(one.task, one.step) for one in late] == [("sums", 12), ("text", 12)]
    assert [metric.name for metric in late[0].metrics] == ["acc", "acc_norm"]
    assert [len(answers) for answers in late[0].answers.values()] == [8, 8]
    assert late[1].metric("bits_per_byte") != early[1].metric("bits_per_byte")
    assert late[0] == windlass.score(run, sums)
    assert windlass.score(run, sums, shots=2).shots == 2
    (two,) = windlass.evaluate(run, sums, limit=2)
    assert {len(answers) for answers in two.answers.values()} == {2}


def test_what_cannot_be_scored_is_refused_in_one_sentence(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, tasks = made_run(home), home / "tasks"
    sums = task_file(tasks, "sums", SUMS)
    long = task_file(tasks, "long", [{"context": "3 is", "choices": ["4" * 300, "5"], "answer": 1}])
    (tasks / "broken.yaml").write_text("task: broken\noutput_type: loglikelihood\n")

    for asked, reason in (
        ((), "no task is named"),
        ((tasks / "none.yaml",), r"no file .*none\.yaml"),
        ((tasks / "sums.toml",), "tasks are YAML files of lm-evaluation-harness"),
        ((sums, sums), "two of the tasks are named `sums`"),
        ((tasks / "broken.yaml",), "cannot be read: "),
        ((long,), "a choice or target has 301 tokens, and the model reads 256"),
    ):
        with pytest.raises(RequestError, match=reason):
            windlass.evaluate(run, *asked)
    with pytest.raises(CheckpointError, match="keeps no checkpoint of step 7"):
        windlass.score(run, sums, step=7)
    with pytest.raises(RequestError, match="ask in it by `--chat`"):
        windlass.evaluate(run, sums, system="Count.")
    monkeypatch.setitem(sys.modules, "lm_eval.models.huggingface", None)
    with pytest.raises(RequestError, match=r"install it with `pip install 'windlass\[hf\]'`"):
        windlass.evaluate(run, sums)


def test_scores_of_earlier_versions_are_read() -> None:
    kept = {"task": "sums", "shots": 1, "correct": [True], "correct_normalised": [], "chance": 0.5,
            "answer_nats": 1.0, "output_type": "multiple_choice",
            "metrics": [{"name": "acc", "value": 1.0}]}  # fmt: skip

    assert TaskScore.model_validate(kept).metric("acc") == 1.0
