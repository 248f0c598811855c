"""`windlass show` and `report`: the record of one run."""

from pathlib import Path

from windlass import api
from windlass.api import AsJson
from windlass.atomic_files import require_output_file
from windlass.cli.console import (
    console,
    print_answer,
    print_json,
    print_written,
)
from windlass.report import expert_table, record_table


def show(run: str = "last", *, runs: Path = api.RUNS, as_json: AsJson = False) -> None:
    """Show one run: predicted beside measured.

    Args:
        run: Folder, name, the first characters of its id, or `last`.
        runs: The folder that holds the run folders.
        as_json: Print plan, prediction and steps as JSON.
    """
    record = api.load(run, root=runs)
    if as_json:
        names = ("id", "folder", "state", "plan", "prediction", "steps", "evaluations", "faults")
        print_json({name: getattr(record, name) for name in names})
        return
    console.print(record_table(record))
    if (experts := expert_table(record.steps)) is not None:
        console.print(experts)
    if record.evaluations:
        print_answer(api.Scores(record.evaluations), as_json=False)


def report(
    run: str = "last",
    *,
    runs: Path = api.RUNS,
    out: Path | None = None,
    trace: Path | None = None,
) -> None:
    """Write one run as a self-contained HTML page, and print the page's path.

    For example: `windlass report last --trace timeline.json`.

    Args:
        run: Folder, name, the first characters of its id, or `last`.
        runs: The folder that holds the run folders.
        out: The page; if not given, `report.html` in the run's folder, or `NAME.html` here where
            that folder is read-only.
        trace: Also write the predicted and the measured timeline of a step to this `.json` file,
            as a trace for ui.perfetto.dev or chrome://tracing.
    """
    if out is not None:
        require_output_file(out)
    if trace is not None:
        api.require_trace_file(trace)
        api.write_run_trace(run, trace, root=runs)
    print_written(trace)
    console.print(str(api.report(run, root=runs, path=out)), soft_wrap=True)
