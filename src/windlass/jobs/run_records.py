"""The runs under a folder: their list, the record of one, its page and its trace."""

import time
from collections.abc import Sequence
from pathlib import Path

from windlass import record as run_store
from windlass.atomic_files import atomic_write, require_output_file, require_writable
from windlass.errors import RecordError, RequestError, StorageError
from windlass.record import RUNS as RUNS, Annotations, RunQuery, RunRow
from windlass.report import perfetto_trace, run_page, runs_notebook
from windlass.schema import REPORT_FILE
from windlass.tracking import RunRecord, find_run, load_run as load_record


class RunList(tuple[RunRow, ...]):
    """Runs in the order that was asked for; a notebook shows them as a table."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<{len(self)} runs>"

    def _repr_html_(self) -> str:
        return runs_notebook(self, time.time())

    def to_dict(self) -> dict[str, list[object]]:
        """Columns by name, as `pandas.DataFrame` and `polars.DataFrame` take them.

        Settings are columns of their own, by dotted key; None stands for what a run lacks.
        """
        names = [name for name in RunRow.__dataclass_fields__ if name != "settings"]
        columns = {name: [_plain(getattr(run, name)) for run in self] for name in names}
        keys = sorted({key for run in self for key in run.settings} - columns.keys())
        return columns | {key: [run.settings.get(key) for run in self] for key in keys}

    def to_parquet(self, folder: Path | str) -> tuple[Path, Path]:
        """Writes the runs and all their steps as `runs.parquet` and `steps.parquet`.

        Args:
            folder: made if it is missing.

        Raises:
            RecordError: pyarrow is missing.
        """
        return run_store.export_parquet(self, Path(folder))


def _plain(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def runs(
    filter: str | None = None,  # noqa: A002  the field's word
    *,
    root: Path | str = RUNS,
    sort: str = "id desc",
    limit: int | None = None,
    archived: bool | None = False,
) -> RunList:
    """The runs under a folder, newest first.

    For example: `windlass.runs('model = "gpt-tiny" and loss < 5')`.

    Args:
        filter: a condition on columns, settings and series; None takes all runs.
        root: the folder that holds the run folders.
        sort: a column, a setting or a series, with ` desc` behind it for the largest first.
        limit: most runs; None gives all.
        archived: only runs that are archived, or are not; None takes both.

    Raises:
        RequestError: the filter is none, or no run has what it should be sorted by.
        InputErrors: the filter has names that no run has, or values of the wrong kind.
    """
    query = RunQuery(filter=filter, sort=sort, limit=limit, archived=archived)
    with run_store.Catalog.open(root) as catalog:
        catalog.refresh()
        return RunList(catalog.rows(query))


def annotate(
    run: str | Path,
    *,
    root: Path | str = RUNS,
    tags: Sequence[str] = (),
    remove: Sequence[str] = (),
    note: str | None = None,
    archived: bool | None = None,
    broken: bool | None = None,
) -> Annotations:
    """Adds tags, a note or a mark to a run, and returns all that it has then.

    Args:
        run: folder, name, the first characters of its id, or `last`.
        root: the folder that holds the run folders.
        tags: words to find the run by.
        remove: tags to take away.
        note: a text to add; earlier notes stay.
        archived: whether lists leave the run out; None changes nothing.
        broken: whether verdicts compare no other run with this one; None changes nothing.

    Raises:
        RecordError: no such run, or more than one; or there is nothing to add.
        InputErrors: a tag or a note is empty, too long or no text.
        StorageError: the folder cannot be written.
    """
    folder = find_run(Path(root), str(run))
    return run_store.annotate(
        folder, tags=tags, remove=remove, note=note, archived=archived, broken=broken
    )


def load(run: str | Path, *, root: Path | str = RUNS) -> RunRecord:
    """The contents of a run folder.

    Args:
        run: folder, name, the first characters of its id, or `last`.
        root: the folder that holds the run folders.

    Raises:
        RecordError: no such run, or more than one.
    """
    return load_record(find_run(Path(root), str(run)))


def report(run: str | Path, *, root: Path | str = RUNS, path: Path | None = None) -> Path:
    """Writes a run as one self-contained HTML page, and returns the page's path.

    Args:
        run: folder, name, the first characters of its id, or `last`.
        root: the folder that holds the run folders.
        path: the page; None is `report.html` in the run folder, or `NAME.html` in the current
            folder where that cannot be written to, as the runs of somebody else.

    Raises:
        RecordError: no such run.
        StorageError: the page cannot be written.
    """
    record = load(run, root=root)
    page = path or _page_of(record.folder)
    atomic_write(page, run_page(record))
    return page


def _page_of(folder: Path) -> Path:
    page = folder / REPORT_FILE
    try:
        require_writable(page)
    except StorageError:
        return Path(f"{folder.name}.html")
    return page


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
