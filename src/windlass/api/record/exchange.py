"""Runs to and from other trackers, by the names that the command line takes."""

from pathlib import Path

from windlass.integrations import (
    ImportedRuns,
    Mirror,
    TrackedRun,
    import_runs as import_from,
    init,
    mirror_run,
)
from windlass.record import RUNS
from windlass.tracking import find_run

__all__ = ["TrackedRun", "import_runs", "init", "mirror"]


def mirror(run: str | Path, *to: str, root: Path | str = RUNS) -> tuple[Mirror, ...]:
    """The copies of a run in other trackers; copying again adds only what is new.

    Args:
        run: folder, name, the first characters of its id, or `last`.
        to: targets such as `tensorboard:logs`, `mlflow:sqlite:///mlflow.db`, `wandb:offline-runs`,
            `trackio:project`, `csv:steps.csv` and `parquet:steps.parquet`.
        root: the folder that holds the run folders.

    Raises:
        RecordError: no such run, or a tracker refuses it.
        RequestError: no such target, or its package is not installed.
        StorageError: a target cannot be written.
    """
    return mirror_run(find_run(Path(root), str(run)), to)


def import_runs(
    source: Path | str, *, tracker: str | None = None, root: Path | str = RUNS
) -> ImportedRuns:
    """The runs of MLflow, TensorBoard, Trackio or W&B, each taken over as a run folder.

    Importing again changes nothing but runs that have grown.

    Args:
        source: a file or folder of theirs; folders are searched.
        tracker: `mlflow`, `tensorboard`, `trackio` or `wandb`; None takes all that it holds.
        root: the folder that holds the run folders.

    Raises:
        RecordError: it holds no runs, or a file of it cannot be read.
        RequestError: no such tracker.
        StorageError: `root` cannot be written.
    """
    return import_from(Path(source), Path(root), tracker)
