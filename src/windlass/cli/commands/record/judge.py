"""`windlass judge` and `windlass noise`: what is to be thought of a run, and how much runs vary."""

import sys
from pathlib import Path

from rich import box
from rich.table import Table

from windlass import api
from windlass.api import SEARCHED_PLAN, AsJson, Flag, PlanOptions, build_plan
from windlass.cli.console import ProgressBars, console, print_json, print_line, print_verdict
from windlass.errors import RequestError
from windlass.judge import Verdict
from windlass.stop_signals import graceful_stop
from windlass.tracking import find_run
from windlass.units import format_seconds


def judge(
    run: str = "last",
    *,
    live: Flag = False,
    alert: str | None = None,
    runs: Path = api.RUNS,
    as_json: AsJson = False,
) -> None:
    """Judge a run: expected, slow, broken, or unknown, and why.

    The exit code is 0 for expected and unknown, and 1 for slow and broken. For example: `windlass
    judge last --live --alert 'notify-send windlass'`.

    Args:
        run: Folder, name, the first characters of its id, or `last`.
        live: Follow a run that is going on, and print each new verdict.
        alert: On slow and broken, run this command with the verdict as JSON on its standard input,
            or send it to this address (http://, https://).
        runs: The folder that holds the run folders.
        as_json: Print the verdict as JSON.
    """
    if alert is not None:
        api.require_alert(alert)
    folder = find_run(runs, run)
    verdict: Verdict | None = None
    with graceful_stop() as stop:
        found = api.follow_verdict(folder, root=runs, stop=stop) if live else ()
        for verdict in found or (api.judge(folder, root=runs),):
            if as_json:
                print_json(verdict.model_dump(mode="json"))
            else:
                print_verdict(verdict)
            if alert is not None and verdict.is_alarm:
                api.send_alert(alert, verdict, folder)
    if verdict is not None and verdict.is_alarm:
        sys.exit(1)


def noise(
    model: str | None = None,
    /,
    *overrides: str,
    seeds: int = 5,
    steps: int = 100,
    options: PlanOptions = SEARCHED_PLAN,
    runs: Path = api.RUNS,
    as_json: AsJson = False,
) -> None:
    """Run a plan with several seeds, and say how much the runs differ: the noise floor.

    The runs are kept as a group in the record, and `judge` compares later runs with them. For
    example: `windlass noise gpt-tiny --plan plan.toml --seeds 5`.

    Args:
        model: A name (`windlass models` lists them), `hf:DIR`, or your own `file.py:function`.
        overrides: `key=value`, such as `train.steps=500` or `model.layers=8`; `windlass keys`
            lists all.
        seeds: Number of runs.
        steps: Steps of each run, of the requested number.
        options: Device memory budget, request file, and a plan file in place of a search.
        runs: The folder that holds the run folders.
        as_json: Print the noise floor as JSON.
    """
    if seeds < 1 or steps < 1:
        raise RequestError(f"`--seeds {seeds} --steps {steps}`: both should be above 0")
    with ProgressBars() as progress:
        planned = build_plan(model, overrides, options, progress=progress)
        floor = api.noise(planned, seeds=seeds, steps=steps, root=runs, progress=progress)
    if as_json:
        print_json(floor)
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("between runs", "noise floor"):
        table.add_column(title)
    rows = {"step time": floor.deviation, "loss": floor.loss, **floor.kinds}
    for name, deviation in rows.items():
        table.add_row(name, f"{deviation:.1%}")
    console.print(table)
    print_line(
        f"{len(floor.folders)} runs of {floor.steps} steps of {format_seconds(floor.seconds)}, "
        f"group `{floor.group}` in the record"
    )
