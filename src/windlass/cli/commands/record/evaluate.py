"""`windlass evaluate`: how well a run's model answers tasks."""

from pathlib import Path

from windlass import api
from windlass.cli.console import ProgressBars, print_json, print_scores
from windlass.cli.flags import AsJson


def evaluate(
    run: str,
    *tasks: Path,
    step: int | None = None,
    shots: int | None = None,
    phases: int = 1,
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
        phases: Groups of layers that take turns in memory, for a model that is too large for it.
        runs: The folder that holds the run folders.
        as_json: Print the scores as JSON.
    """
    with ProgressBars() as progress:
        scores = api.evaluate(
            run, *tasks, step=step, shots=shots, phases=phases, root=runs, progress=progress
        )
    if as_json:
        print_json(scores)
        return
    print_scores(scores)
