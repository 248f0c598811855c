"""`windlass evaluate`: how well a run's model answers tasks."""

import re
from pathlib import Path

from windlass import api
from windlass.api import AsJson, Flag
from windlass.cli.console import ProgressBars, print_json, print_scores

_OVERRIDE = re.compile(r"[a-z_]+(\.[a-z_]+)*=(?!.*\.ya?ml$)")
"""A key and a value, which the name of a YAML file is not."""


def evaluate(
    run: str,
    *words: str,
    tasks: str = "",
    step: int | None = None,
    shots: int | None = None,
    limit: int | None = None,
    chat: Flag = False,
    system: str | None = None,
    phases: int = 1,
    ema: Flag = False,
    runs: Path = api.RUNS,
    as_json: AsJson = False,
) -> None:
    """Score a trained model on tasks, by lm-evaluation-harness.

    For example: `windlass evaluate last --tasks hellaswag,capitals.yaml parallel.pipeline=2`.

    Args:
        run: Folder, name, the first characters of its id, or `last`.
        words: Tasks, as for `--tasks`; and `key=value` of a plan, such as `parallel.pipeline=2`,
            whose ranks answer together on this host.
        tasks: Names in the library of lm-evaluation-harness or YAML files of its form, divided by
            commas.
        step: Step of the checkpoint; the newest good one if not given.
        shots: Solved questions before each question; as many as each task says if not given.
        limit: Most questions of each task; all if not given.
        chat: Ask in the model's chat template.
        system: With `--chat`, the system prompt.
        phases: Groups of layers that take turns in memory, for a model that is too large for it.
        ema: Score the averages of the weights that the run keeps (`train.ema`).
        runs: The folder that holds the run folders.
        as_json: Print the scores as JSON.
    """
    overrides = [word for word in words if _OVERRIDE.match(word)]
    names = [*(word for word in words if word not in overrides), tasks]
    with ProgressBars() as progress:
        scores = api.evaluate(
            run, *names, step=step, shots=shots, limit=limit, chat=chat, system=system,
            phases=phases, overrides=overrides, ema=ema, root=runs, progress=progress,
        )  # fmt: skip
    if as_json:
        print_json(scores)
        return
    print_scores(scores)
