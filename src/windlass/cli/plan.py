"""`windlass plan` and `windlass fit`: what a step will cost, whether it fits, and why."""

import json
import sys
from pathlib import Path

from windlass import api
from windlass.cli.console import Bars, console
from windlass.cli.words import request_of
from windlass.report.table import plan_table, prediction_table, runners_up_table
from windlass.search.explain import Explanation, explain, explain_runner_up
from windlass.spec.prediction import Prediction
from windlass.units import show_bytes

_REFUSED_SHOWN = 4


def plan(
    model: str | None = None,
    *overrides: str,
    on: str | None = None,
    near: str | None = None,
    file: Path | None = None,
    out: Path | None = None,
    as_json: bool = False,
) -> None:
    """Choose a plan and say what it will cost, which plans came next, and why they lost.

    Args:
        model: a name (`windlass models` lists them), or `file.py:function` of your own.
        overrides: `key=value`, such as `train.batch=32` or `batch.micro=4`.
        on: the machine; `here` if not given.
        near: budget for the near memory, such as `4GiB`.
        file: a request in TOML.
        out: write the plan to this TOML file too.
        as_json: print plan and prediction as JSON.
    """
    with Bars() as progress:
        request = request_of(model, overrides, on=on, near=near, file=file)
        planned = api.plan(request, progress=progress)
    chosen, prediction, choice = planned.plan, planned.prediction, planned.choice
    if out is not None:
        chosen.save(out)
    if as_json:
        tree = {"plan": chosen.model_dump(mode="json"), "prediction": _dump(prediction)}
        sys.stdout.write(json.dumps(tree, indent=1) + "\n")
        return
    told = explain(choice)
    console.print(plan_table(chosen, planned.graph))
    console.print()
    console.print(prediction_table(prediction))
    if choice.runners_up:
        console.print(
            runners_up_table(
                [(r.plan, r.prediction, explain_runner_up(r)) for r in choice.runners_up]
            )
        )
    _print_refused(told)


def fit(
    model: str | None = None,
    *overrides: str,
    on: str | None = None,
    near: str | None = None,
    file: Path | None = None,
) -> None:
    """Say whether training a model fits, memory class by class, and if not, what would help.

    The exit code is 0 for yes and 1 for no.

    Args:
        model: a name (`windlass models` lists them), or `file.py:function` of your own.
        overrides: `key=value`, such as `train.batch=32` or `batch.micro=4`.
        on: the machine; `here` if not given.
        near: budget for the near memory, such as `4GiB`.
        file: a request in TOML.
    """
    with Bars() as progress:
        request = request_of(model, overrides, on=on, near=near, file=file)
        planned = api.plan(request, progress=progress)
    told = explain(planned.choice)
    name = request.model.name
    if planned.choice.fits:
        console.print(f"[bold green]yes[/], `{name}` {told.verdict}", soft_wrap=True)
        _print_memory(planned.prediction)
        _print_refused(told)
        return
    console.print(f"[bold red]no[/], `{name}` {told.verdict}", soft_wrap=True)
    if planned.choice.advice is not None:
        for part, nbytes in planned.choice.advice.by_class.items():
            console.print(f"  {part:<12} {show_bytes(nbytes):>9} predicted")
    console.print("what would help")
    for line in told.help:
        console.print(f"  - {line}", soft_wrap=True)
    # So that `windlass fit X && windlass train X` says what it means.
    sys.exit(1)


def _print_memory(prediction: Prediction) -> None:
    for part, nbytes in prediction.peaks[0].by_class.items():
        console.print(f"  {part:<12} {show_bytes(nbytes):>9} predicted")


def _print_refused(told: Explanation) -> None:
    if told.refused:
        console.print("does not fit")
        for line in told.refused[:_REFUSED_SHOWN]:
            console.print(f"  - {line}", soft_wrap=True)


def _dump(prediction: Prediction) -> dict[str, object]:
    derived = {"tokens_per_second": prediction.tokens_per_second, "mfu": prediction.mfu}
    return {**prediction.model_dump(mode="json"), **derived}
