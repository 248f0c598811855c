"""`windlass record`: the largest model that this machine trains, one step of it, proved."""

import sys
from pathlib import Path

from windlass import api
from windlass.cli.commands.train import graceful_stop
from windlass.cli.console import ProgressBars, console, error_console, print_json
from windlass.cli.options import AsJson
from windlass.report.terminal.largest_model_table import largest_model_table
from windlass.report.terminal.plan_tables import plan_table
from windlass.units import format_seconds


def largest_model(
    model: str | None = None,
    *overrides: str,
    on: str | None = None,
    memory: str | None = None,
    runs: Path = api.RUNS,
    folder: Path | None = None,
    keep_checkpoint: bool = False,
    as_json: AsJson = False,
) -> None:
    """Train one step of the largest model that this machine can, and prove it right.

    The step is held against a plain walk over the same model and batch. The exit code is 0 if loss
    and gradients agree, and 1 if not.

    Args:
        model: a name (`windlass models` lists them); the largest that fits if not given.
        overrides: `key=value`, such as `phases=24` or `precision=bfloat16`.
        on: the machine; only `here` can be measured.
        near: budget for the near memory, such as `4GiB`.
        runs: where run folders lie.
        folder: train into this folder in place of a new one under `runs`.
        keep_checkpoint: leave the checkpoint, which is as large as the state.
        as_json: print what was predicted, measured and proved as JSON.
    """
    api.require_local(on)
    if model is not None and "=" in model:
        overrides, model = (model, *overrides), None
    with graceful_stop() as stop:
        with ProgressBars() as progress:
            planned = api.largest_model(
                model, *overrides, memory=memory, root=folder or runs, progress=progress
            )
        if not as_json:
            console.print(plan_table(planned.plan, planned.graph))
        seconds = format_seconds(planned.prediction.step_seconds)
        error_console.print(
            f"[bold]predicted[/]    {seconds} a step, and about as long to prove it"
        )
        with ProgressBars() as progress:
            recorded = api.measure_largest_model(
                planned,
                root=runs,
                folder=folder,
                keep_checkpoint=keep_checkpoint,
                stop=stop,
                progress=progress,
            )
    if as_json:
        print_json({"recorded": recorded, "holds": recorded.verification.within_tolerance})
    else:
        console.print(largest_model_table(recorded))
    if not recorded.verification.within_tolerance:
        sys.exit(1)
