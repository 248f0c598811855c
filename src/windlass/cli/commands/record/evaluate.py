"""`windlass evaluate`: how well a run's model answers tasks."""

import re
from pathlib import Path

from windlass import api
from windlass.cli.console import ProgressBars, print_json, print_scores
from windlass.cli.flags import AsJson, Flag

_OVERRIDE = re.compile(r"[a-z_]+(\.[a-z_]+)*=(?!.*\.toml$)")
"""A key and a value, which the name of a TOML file is not."""


def evaluate(
    run: str,
    *tasks: str,
    step: int | None = None,
    shots: int | None = None,
    phases: int = 1,
    ema: Flag = False,
    runs: Path = api.RUNS,
    as_json: AsJson = False,
) -> None:
    """Ask a trained model the questions of some tasks, and print its scores.

    For example: `windlass evaluate last capitals.toml parallel.pipeline=2`.

    Args:
        run: Folder, name, the first characters of its id, or `last`.
        tasks: TOML files of tasks; and `key=value` of a plan, such as `parallel.pipeline=2`, whose
            ranks answer together on this host.
        step: Step of the checkpoint; the newest good one if not given.
        shots: Solved questions before each question; as many as each task says if not given.
        phases: Groups of layers that take turns in memory, for a model that is too large for it.
        ema: Score the averages of the weights that the run keeps (`train.ema`).
        runs: The folder that holds the run folders.
        as_json: Print the scores as JSON.
    """
    overrides = [word for word in tasks if _OVERRIDE.match(word)]
    files = [Path(word) for word in tasks if word not in overrides]
    with ProgressBars() as progress:
        scores = api.evaluate(
            run, *files, step=step, shots=shots, phases=phases, overrides=overrides, ema=ema,
            root=runs, progress=progress,
        )  # fmt: skip
    if as_json:
        print_json(scores)
        return
    print_scores(scores)
