"""A trained run answers the questions of a task."""

from pathlib import Path

import pytest

import windlass
from command_line import TINY
from windlass.data import Task, TaskItem, TextItem, save_task
from windlass.errors import CheckpointError, InputErrors, RequestError

ITEM = TaskItem(context="3 times 3 is", choices=(" 9", " zebra"), answer=0)


def made_task(**changes: object) -> Task:
    return Task(**({"name": "sums", "items": (ITEM,) * 3, "examples": (ITEM,)} | changes))


def made_run(home: Path, *words: str) -> Path:
    text = f"data.source={home / 'text'}"
    planned = windlass.plan(*TINY, text, "train.steps=12", "train.save_every=6", *words)
    run = windlass.train(planned, root=home / "runs")
    list(run)
    return run.folder


def test_a_run_is_scored_on_a_task_from_any_of_its_checkpoints(home: Path) -> None:
    run = made_run(home)
    path = save_task(made_task(), home / "tasks")

    last = windlass.score(run, path)

    assert (last.task, last.shots, len(last.correct), last.chance) == ("sums", 0, 3, 0.5)
    assert len(set(last.correct)) == 1  # the same question three times
    assert last == windlass.score(run, made_task(), step=12)
    assert last.answer_nats != windlass.score(run, path, step=6).answer_nats
    assert last.answer_nats != windlass.score(run, path, shots=1).answer_nats


def test_scores_are_kept_with_the_run(home: Path) -> None:
    run = made_run(home)
    texts = Task(
        name="texts", items=(TextItem(text="3 times 3 is 9"),), output_type="loglikelihood_rolling"
    )

    late = windlass.evaluate(run, made_task(), texts)
    early = windlass.evaluate(run, made_task(), step=6)

    assert windlass.load(run).evaluations == (*early, *late)
    assert [score.step for score in (*early, *late)] == [6, 12, 12]
    with pytest.raises(RequestError, match="no task is named"):
        windlass.evaluate(run)


def test_what_cannot_be_scored_is_refused_in_one_sentence(home: Path) -> None:
    run = made_run(home)
    long = TaskItem(context="3", choices=("4" * 300, "5"), answer=1)

    with pytest.raises(CheckpointError, match="keeps no checkpoint of step 7"):
        windlass.score(run, made_task(), step=7)
    with pytest.raises(InputErrors, match="question 1 of task `sums` has a choice of 300 tokens"):
        windlass.score(run, made_task(items=(long,)))
    with pytest.raises(RequestError, match=r"no file .*none\.toml"):
        windlass.score(run, home / "none.toml")


def test_a_choice_that_merges_with_its_context_is_refused(home: Path) -> None:
    run = made_run(home, "data.tokenizer=bpe", "data.vocabulary=300", "model.vocabulary=300")
    merged = TaskItem(context="3 tim", choices=("es", " zebra"), answer=0)

    with pytest.raises(
        InputErrors, match="question 2 of task `sums` has a choice that becomes one"
    ):
        windlass.score(run, made_task(items=(ITEM, merged)))
