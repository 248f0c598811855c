"""`windlass diff` and `windlass bisect`: what differs between runs, and what of it matters."""

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
    print_written,
)
from windlass.errors import RequestError
from windlass.judge import RunDiff
from windlass.report import run_diff_table

_CODE_LINES = 60
"""Lines of a diff of the code that are printed; the page has all of them."""


def diff(
    *names: str, runs: Path = api.RUNS, page: Path | None = None, as_json: AsJson = False
) -> None:
    """Show which inputs of runs differ, and how far their results are apart.

    For example: `windlass diff last~1 last`, or `windlass diff 1a2b3c 4d5e6f --page diff.html`.

    Args:
        names: Two or more runs: folder, name, the first characters of an id, or `last`.
        runs: The folder that holds the run folders.
        page: Also write a self-contained HTML page to this file.
        as_json: Print everything as JSON.
    """
    if len(names) < 2:
        raise RequestError("name two runs or more to compare; `windlass runs` lists them")
    found = api.diff(*names, root=runs)
    if page is not None:
        api.write_run_diff(page, found)
    if as_json:
        print_json(found)
    else:
        _print_diff(found)
    print_written(page)


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


def _print_diff(found: RunDiff) -> None:
    console.print(run_diff_table(found))
    for line in found.code[:_CODE_LINES]:
        colour = {"+": "green", "-": "red", "@": "cyan"}.get(line[:1], "")
        print_line(Text(line, style=colour))
    if len(found.code) > _CODE_LINES:
        print_line(f"... {len(found.code) - _CODE_LINES} more lines; `--page` writes all of them")
