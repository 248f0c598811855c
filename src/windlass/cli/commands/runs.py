"""`windlass runs`, `show` and `report`: what was run, and how it went beside its prediction."""

import time
from pathlib import Path

from rich.markup import escape

from windlass import api
from windlass.cli.console import console, print_json, print_line
from windlass.cli.options import AsJson
from windlass.report.terminal.run_tables import record_table, runs_table
from windlass.tracking.run_index import describe_other_formats


def runs(*, runs: Path = api.RUNS, as_json: AsJson = False) -> None:
    """List all runs, newest first.

    Args:
        runs: where run folders lie.
        as_json: print the runs as JSON.
    """
    found = api.runs(runs)
    if as_json:
        print_json(found)
        return
    if found:
        console.print(runs_table(found, time.time()))
    else:
        console.print(f"no runs in `{runs}` yet; begin one with `windlass train`")
    if others := describe_other_formats(runs):
        print_line(escape(others))


def show(run: str = "last", *, runs: Path = api.RUNS, as_json: AsJson = False) -> None:
    """Show one run, predicted beside measured.

    Args:
        run: folder, name, beginning of its id, or `last`.
        runs: where run folders lie.
        as_json: print plan, prediction and steps as JSON.
    """
    record = api.load(run, root=runs)
    if as_json:
        names = ("id", "folder", "state", "plan", "prediction", "steps", "faults")
        print_json({name: getattr(record, name) for name in names})
        return
    console.print(record_table(record))


def report(run: str = "last", *, runs: Path = api.RUNS) -> None:
    """Draw one run as a self-contained HTML page in its folder.

    Args:
        run: folder, name, beginning of its id, or `last`.
        runs: where run folders lie.
    """
    console.print(str(api.report(run, root=runs)), soft_wrap=True)
