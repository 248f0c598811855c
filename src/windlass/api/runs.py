"""The runs under a folder: their list, the record of one, its page and its trace."""

import time
from pathlib import Path

from windlass.atomic_files import atomic_write, require_output_file
from windlass.errors import RecordError, RequestError
from windlass.report import perfetto_trace, run_page, runs_notebook
from windlass.schema import REPORT_FILE
from windlass.tracking import RunRecord, RunSummary, find_run, list_runs, load_run as load_record

RUNS = Path("runs")
"""The folder that holds the run folders, unless a caller names another one."""


class RunList(tuple[RunSummary, ...]):
    """Runs, newest first; a notebook shows them as a table."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return runs_notebook(self, time.time())


def runs(root: Path | str = RUNS) -> RunList:
    """All runs under `root`, newest first."""
    return RunList(list_runs(Path(root)))


def load(run: str | Path, *, root: Path | str = RUNS) -> RunRecord:
    """The contents of a run folder.

    Args:
        run: folder, name, the first characters of its id, or `last`.
        root: the folder that holds the run folders.

    Raises:
        RecordError: no such run, or more than one.
    """
    return load_record(find_run(Path(root), str(run)))


def report(run: str | Path, *, root: Path | str = RUNS) -> Path:
    """Writes a run as one self-contained HTML page in its folder, and returns the page's path.

    Raises:
        RecordError: no such run.
        StorageError: the disk is full.
    """
    record = load(run, root=root)
    path = record.folder / REPORT_FILE
    atomic_write(path, run_page(record))
    return path


def write_run_trace(run: str | Path, path: Path, *, root: Path | str = RUNS) -> None:
    """Writes the predicted and the measured timeline of a run's step as one trace.

    The trace is JSON for ui.perfetto.dev and chrome://tracing; each timeline is a process in it.

    Args:
        run: folder, name, the first characters of its id, or `last`.
        path: the `.json` file to write.
        root: the folder that holds the run folders.

    Raises:
        RecordError: no such run, or it has no timeline.
        RequestError: `path` is no `.json` file.
        StorageError: the file cannot be written.
    """
    require_trace_file(path)
    record = load(run, root=root)
    timelines = {"predicted": record.predicted_timeline, "measured": record.measured_timeline}
    present = {name: timeline for name, timeline in timelines.items() if timeline is not None}
    if not present:
        raise RecordError(f"run `{record.folder.name}` has no timeline to write as a trace")
    atomic_write(path, perfetto_trace(present))


def require_trace_file(path: Path) -> None:
    """Refuses a path that a trace cannot be written to, before anything else is done.

    Raises:
        RequestError: it does not end in `.json`.
        StorageError: no file can be written there.
    """
    if path.suffix != ".json":
        raise RequestError(f"`{path}` is no trace file; write `{path.with_suffix('.json')}`")
    require_output_file(path)
