"""Tasks that a run scores while it trains."""

from pathlib import Path

import pytest

import windlass
from command_line import TINY
from windlass.data import Task, TaskItem, TextItem, save_task
from windlass.errors import RequestError
from windlass.report.formatting import format_task_scores
from windlass.tracking import read_series

ITEM = TaskItem(context="3 times 3 is", choices=(" 9", " zebra"), answer=0)
TASKS = (
    Task(name="sums", items=(ITEM,) * 3, examples=(ITEM,), shots=1),
    Task(name="texts", items=(TextItem(text="3 times 3 is 9"),),
         output_type="loglikelihood_rolling"),
)  # fmt: skip

SAME = 1e-6
"""Relative: the same float32 weights, whose products are batched in another way."""


def test_scores_during_training_are_those_of_the_checkpoint(home: Path) -> None:
    files = [save_task(task, home / "tasks") for task in TASKS]
    words = ("train.steps=5", "train.evaluate_tasks_every=2", "train.save_every=2")
    named = f"train.tasks={','.join(map(str, files))}"
    run = windlass.train(*TINY, f"data.source={home / 'text'}", named, *words, root=home / "runs")

    measured = list(run)

    assert [step.step for step in measured if step.task_scores] == [2, 4, 5]
    steps = windlass.load(run.folder).steps
    assert [step.task_scores for step in steps] == [dict(step.task_scores) for step in measured]
    for number in (4, 5):
        scores = windlass.evaluate(run.folder, *files, step=number)
        expected = {f"{one.task}.{m.name}": m.value for one in scores for m in one.metrics}
        assert steps[number - 1].task_scores == pytest.approx(expected, rel=SAME)
    assert read_series(run.folder)["task.sums.acc"].steps.tolist() == [2, 4, 5]
    assert format_task_scores(steps[-1]).startswith("sums acc ")
    # A later attempt reads the tasks from the run's folder.
    assert {path.name for path in (run.folder / "tasks").iterdir()} >= {"sums.toml", "texts.toml"}


@pytest.mark.parametrize(
    ("words", "names", "reason"),
    [
        ((), ("none.toml",), r"no file .*none\.toml"),
        ((), ("sums.toml", "sums.toml"), "2 of `train.tasks` are named `sums`"),
        (("bert-tiny", *TINY[1:], "model.vocabulary=300"), ("sums.toml",), "masked tokens"),
    ],
    ids=["no file", "one name", "masked"],
)
def test_tasks_that_a_run_cannot_score_are_refused_before_it_starts(
    home: Path, words: tuple[str, ...], names: tuple[str, ...], reason: str
) -> None:
    save_task(TASKS[0], home)
    named = f"train.tasks={','.join(str(home / name) for name in names)}"

    with pytest.raises(RequestError, match=reason):
        windlass.train(
            *(words or TINY), f"data.source={home / 'text'}", named, "train.steps=2",
            root=home / "runs",
        )  # fmt: skip

    assert not list((home / "runs").glob("*"))
