"""`windlass largest-model`: the largest model that this machine trains, with one verified step."""

import sys
from pathlib import Path

from rich.text import Text

from windlass import api
from windlass.api import AsJson, Flag
from windlass.cli.console import ProgressBars, console, error_console, print_json, print_plan
from windlass.report import largest_model_table
from windlass.stop_signals import graceful_stop
from windlass.units import format_seconds


def largest_model(
    model: str | None = None,
    /,
    *overrides: str,
    on: str | None = None,
    memory: str | None = None,
    runs: Path = api.RUNS,
    folder: Path | None = None,
    keep_checkpoint: Flag = False,
    as_json: AsJson = False,
) -> None:
    """Find the largest model that this machine can train, train one step of it, and verify it.

    The step is compared with a plain reference step of the same model and batch. The exit code is
    0 if loss and gradients agree, and 1 if not.

    For example: `windlass largest-model --memory 4GiB`.

    Args:
        model: A name (`windlass models` lists them); the largest that fits if not given.
        overrides: `key=value`, such as `phases=24` or `precision=bfloat16`; `windlass keys`
            lists all.
        on: The machine; only `here` can be measured.
        memory: Device memory budget, such as `4GiB`; all of it if not given.
        runs: The folder that holds the run folders.
        folder: Train into this folder instead of a new one under `runs`.
        keep_checkpoint: Keep the checkpoint, which is as large as the training state.
        as_json: Print predictions, measurements and the verification as JSON.
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
            print_plan(planned)
        seconds = format_seconds(planned.prediction.step_seconds)
        error_console.print(
            Text.assemble(
                ("predicted", "bold"), f"    {seconds} a step, and about as long to verify it"
            )
        )
        with ProgressBars() as progress:
            measured = api.measure_largest_model(
                planned,
                root=runs,
                folder=folder,
                keep_checkpoint=keep_checkpoint,
                stop=stop,
                progress=progress,
            )
    equal = measured.verification.within_tolerance
    if as_json:
        print_json({"measured": measured, "equal": equal})
    else:
        console.print(largest_model_table(measured))
    if not equal:
        sys.exit(1)
