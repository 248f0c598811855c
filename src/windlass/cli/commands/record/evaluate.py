"""`windlass evaluate`: how well a run's model answers tasks."""

from pathlib import Path

from windlass import api
from windlass.cli.console import ProgressBars, print_json, print_line, print_table
from windlass.cli.flags import AsJson
from windlass.schema import TaskMetric, TaskScore


def evaluate(
    run: str,
    *tasks: Path,
    step: int | None = None,
    shots: int | None = None,
    runs: Path = api.RUNS,
    as_json: AsJson = False,
) -> None:
    """Ask a trained model the questions of some tasks, and print its scores.

    For example: `windlass evaluate last capitals.toml --step 200`.

    Args:
        run: Folder, name, the first characters of its id, or `last`.
        tasks: TOML files of tasks.
        step: Step of the checkpoint; the newest good one if not given.
        shots: Solved questions before each question; as many as each task says if not given.
        runs: The folder that holds the run folders.
        as_json: Print the scores as JSON.
    """
    with ProgressBars() as progress:
        scores = api.evaluate(run, *tasks, step=step, shots=shots, root=runs, progress=progress)
    if as_json:
        print_json(scores)
        return
    print_line(f"step    {scores[0].step}")
    heads = ("task", "n-shot", "metric", "value", "stderr")
    print_table(heads, (row for score in scores for row in _rows(score)))


def _rows(score: TaskScore) -> list[tuple[str, ...]]:
    """A row for each metric; the first one names the task."""
    return [
        (
            score.task if not index else "",
            str(score.shots) if not index else "",
            metric.name,
            f"{metric.value:.4f}",
            _error(metric),
        )
        for index, metric in enumerate(score.metrics)
    ]


def _error(metric: TaskMetric) -> str:
    return f"± {metric.standard_error:.4f}" if metric.standard_error is not None else ""
