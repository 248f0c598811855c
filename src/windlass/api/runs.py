"""Records: which runs there are, what one of them tells, and its page."""

from pathlib import Path

from windlass.atomic_files import atomic_write
from windlass.report.html.run_page import run_page
from windlass.schema import run_record as names
from windlass.tracking.load_run import RunRecord
from windlass.tracking.load_run import load_run as load_record
from windlass.tracking.run_index import RunSummary, find_run, list_runs

RUNS = Path("runs")
"""Where run folders lie unless a caller says otherwise."""


def runs(root: Path | str = RUNS) -> tuple[RunSummary, ...]:
    """All runs under `root`, newest first."""
    return list_runs(Path(root))


def load(run: str | Path, *, root: Path | str = RUNS) -> RunRecord:
    """All that a run's folder tells.

    Args:
        run: folder, name, beginning of its id, or `last`.
        root: where run folders lie.

    Raises:
        RecordError: no such run, or more than one.
    """
    return load_record(find_run(Path(root), str(run)))


def report(run: str | Path, *, root: Path | str = RUNS) -> Path:
    """Draws a run as one self-contained page in its folder, and gives its place.

    Raises:
        RecordError: no such run.
        StorageError: the disk is full.
    """
    record = load(run, root=root)
    path = record.folder / names.REPORT_FILE
    atomic_write(path, run_page(record))
    return path
