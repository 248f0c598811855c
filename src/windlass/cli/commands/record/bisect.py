"""`windlass bisect`: which difference between two runs makes one of them bad."""

import sys
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from windlass import api
from windlass.api import AsJson, Flag
from windlass.cli.console import (
    ProgressBars,
    console,
    error_console,
    print_bullets,
    print_json,
    print_line,
)
from windlass.errors import RequestError


def bisect(
    good: str,
    bad: str,
    *,
    metric: str | None = None,
    steps: int | None = None,
    most_tests: int = 8,
    run_recorded_code: Flag = False,
    runs: Path = api.RUNS,
    as_json: AsJson = False,
) -> None:
    """Find which difference between two runs makes one of them bad, by short runs.

    For example: `windlass bisect 1a2b3c last --metric loss`.

    Args:
        good: A run that is as it should be.
        bad: A run that is not.
        metric: `loss` or `seconds`; what differs more if not given.
        steps: Steps of each short run; as few as tell the two apart if not given.
        most_tests: Sets of differences that are tried at most.
        run_recorded_code: Also run the model, code and settings of runs that you did not make on
            this machine, after showing them.
        runs: The folder that holds the run folders.
        as_json: Print the result as JSON.
    """
    if run_recorded_code:
        _show_recorded_code(good, bad, runs)
    with ProgressBars() as progress:
        found = api.bisect(
            good, bad, metric=metric, steps=steps, most_tests=most_tests, root=runs,
            run_recorded_code=run_recorded_code, progress=progress,
        )  # fmt: skip
    if as_json:
        print_json(found)
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in ("test", found.metric, "is", "with"):
        table.add_column(head, overflow="fold")
    for number, test in enumerate(found.tests, start=1):
        table.add_row(str(number), f"{test.value:.5g}", test.result, ", ".join(test.changes) or "-")
    console.print(table)
    print_line(found.verdict)
    print_bullets(found.untested)


def _show_recorded_code(good: str, bad: str, runs: Path) -> None:
    """Shows the code of others that is about to run, and asks where somebody can answer."""
    lines = api.recorded_code(good, bad, root=runs)
    for line in lines:
        error_console.print(Text(line), soft_wrap=True)
    if lines and sys.stdin.isatty() and console.input("run this here? [y/N] ").strip() != "y":
        raise RequestError("nothing was run")
