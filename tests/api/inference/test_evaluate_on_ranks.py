"""The ranks of a plan score as one process does."""

from pathlib import Path

import pytest

import windlass
from command_line import TINY
from task_files import all_tasks
from windlass.errors import CheckpointError, RequestError
from windlass.schema.answers.task_score import TaskScore

PLANS = {
    "pipeline": ("parallel.pipeline=2",),
    "tensor": ("parallel.tensor=2",),
    "sharded": ("parallel.data=2", "sharding.parameters=2"),
    "experts": ("parallel.data=2", "parallel.expert=2"),
}


def made_run(home: Path, *words: str, model: str = TINY[0]) -> Path:
    text = f"data.source={home / 'text'}"
    planned = windlass.plan(model, *TINY[1:], text, "train.steps=12", "train.save_every=12", *words)
    run = windlass.train(planned, root=home / "runs")
    list(run)
    return run.folder


def printed(scores: tuple[TaskScore, ...]) -> list[tuple[str, str, str]]:
    """Task, metric and value as `windlass evaluate` prints them."""
    return [
        (score.task, metric.name, f"{metric.value:.4f}")
        for score in scores
        for metric in score.metrics
    ]


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_ranks_score_to_every_printed_digit_as_one_process_does(home: Path, plan: str) -> None:
    is_mixture = plan == "experts"
    words = ("model.experts=4", "model.kv_heads=1") if is_mixture else ()
    run = made_run(home, *words, model="moe-tiny" if is_mixture else TINY[0])
    tasks = all_tasks(home / "tasks")
    alone = windlass.evaluate(run, *tasks)

    together = windlass.evaluate(run, *tasks, overrides=PLANS[plan])

    assert printed(together) == printed(alone)
    # Kept in place of those of one process.
    assert sorted(windlass.load(run).evaluations, key=str) == sorted(together, key=str)
    assert not list(run.glob("tmp*"))


@pytest.mark.slow
def test_averages_are_scored_on_ranks_too(home: Path) -> None:
    run, tasks = made_run(home, "train.ema=0.9"), all_tasks(home / "tasks")
    plain, averaged = (
        windlass.evaluate(run, *tasks),
        windlass.evaluate(run, *tasks, ema=True),
    )

    together = windlass.evaluate(run, *tasks, ema=True, overrides=("parallel.pipeline=2",))

    assert printed(together) == printed(averaged) != printed(plain)
    assert {score.ema for score in windlass.load(run).evaluations} == {True, False}


def test_what_ranks_cannot_score_is_refused_in_one_sentence(home: Path) -> None:
    run = made_run(home, "train.steps=1", "train.save_every=1")
    tasks = all_tasks(home / "tasks")

    with pytest.raises(RequestError, match=r"`train\.steps=9` says nothing of the ranks"):
        windlass.evaluate(run, *tasks, overrides=("train.steps=9",))
    with pytest.raises(RequestError, match="the plan has one device"):
        windlass.evaluate(run, *tasks, overrides=("parallel.pipeline=1",))
    with pytest.raises(RequestError, match="`phases` = 2 is of one process"):
        windlass.evaluate(run, *tasks, phases=2, overrides=("parallel.pipeline=2",))
    with pytest.raises(CheckpointError, match=r"no averages of its weights \(EMA\)"):
        windlass.evaluate(run, *tasks, ema=True)
    with pytest.raises(CheckpointError, match=r"no averages of its weights \(EMA\)"):
        list(windlass.sample(run, "3", ema=True))
