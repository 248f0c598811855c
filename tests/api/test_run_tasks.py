"""Tasks that a run scores while it trains."""

from pathlib import Path

import pytest

import windlass
from command_line import TINY
from task_files import SUMS, TEXTS, task_file
from windlass.errors import RequestError
from windlass.report.formatting import format_task_scores
from windlass.tracking import read_series

SAME = 1e-6
"""Relative: the same float32 weights, whose products are batched in another way."""


def test_scores_during_training_are_those_of_the_checkpoint(home: Path) -> None:
    shots = {"fewshot_split": "test", "fewshot_config": {"sampler": "first_n"}, "num_fewshot": 1}
    files = [
        task_file(home / "tasks", "sums", SUMS[:3], **shots),
        task_file(home / "tasks", "texts", TEXTS[:1]),
    ]
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


def test_a_resumed_run_asks_what_it_has_asked_or_is_refused(home: Path) -> None:
    file = task_file(home / "tasks", "sums", SUMS[:3])
    run = windlass.train(
        *TINY, f"data.source={home / 'text'}", f"train.tasks={file}", "train.steps=4",
        "train.save_every=1", "train.evaluate_tasks_every=1", root=home / "runs",
    )  # fmt: skip
    steps = iter(run)
    next(steps)
    run.stop() if hasattr(run, "stop") else steps.close()

    task_file(home / "tasks", "sums", SUMS[3:])

    with pytest.raises(RequestError, match="ask other questions than when it began"):
        list(windlass.resume(run.folder))


@pytest.mark.parametrize(
    ("words", "names", "reason"),
    [
        ((), ("none.yaml",), r"no file .*none\.yaml"),
        ((), ("sums.yaml", "sums.yaml"), "two of the tasks are named `sums`"),
        ((), ("writes.yaml",), "`writes` lets the model write"),
        (("bert-tiny", *TINY[1:], "model.vocabulary=300"), ("sums.yaml",), "masked tokens"),
    ],
    ids=["no file", "one name", "writes", "masked"],
)
def test_tasks_that_a_run_cannot_score_are_refused_before_it_starts(
    home: Path, words: tuple[str, ...], names: tuple[str, ...], reason: str
) -> None:
    task_file(home, "sums", SUMS)
    task_file(home, "writes", [{"context": "a", "target": "b"}], output_type="generate_until")
    named = f"train.tasks={','.join(str(home / name) for name in names)}"

    with pytest.raises(RequestError, match=reason):
        windlass.train(
            *(words or TINY), f"data.source={home / 'text'}", named, "train.steps=2",
            root=home / "runs",
        )  # fmt: skip

    assert not list((home / "runs").glob("*"))
