"""`windlass runs`, `show` and `report`: what was run, and how it went beside its prediction."""

import time
from pathlib import Path

from windlass import api
from windlass.cli.console import console
from windlass.report.table import record_table, runs_table


def runs(*, runs: Path = api.RUNS) -> None:
    """List all runs, newest first.

    Args:
        runs: where run folders lie.
    """
    found = api.runs(runs)
    if not found:
        console.print(f"no runs in `{runs}` yet; begin one with `windlass train`")
        return
    console.print(runs_table(found, time.time()))


def show(run: str = "last", *, runs: Path = api.RUNS) -> None:
    """Show one run, predicted beside measured.

    Args:
        run: folder, name, beginning of its id, or `last`.
        runs: where run folders lie.
    """
    console.print(record_table(api.load(run, root=runs)))


def report(run: str = "last", *, runs: Path = api.RUNS) -> None:
    """Draw one run as a self-contained HTML page in its folder.

    Args:
        run: folder, name, beginning of its id, or `last`.
        runs: where run folders lie.
    """
    console.print(str(api.report(run, root=runs)), soft_wrap=True)
