"""Runs to and from other trackers, by the names that the command line takes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import RenderableType

from windlass.answer import Answers, Shown, word_table
from windlass.flags import AnyPath, Names, RunsFolder
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


class Mirrors(Answers[Mirror]):
    """The copies of a run in other trackers."""

    def lines(self) -> Iterator[RenderableType]:
        """Tracker and place of each."""
        for copy in self:
            yield f"{copy.target.partition(':')[0]:<12} {copy.place}"


class ShownImport(Shown[ImportedRuns]):
    """Runs that were taken over from other trackers."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What was left out, and what was odd."""
        left_out = self.value.left_out
        parts = ", ".join(f"{count} {what}" for what, count in left_out.items())
        return (*([f"not taken over: {parts}"] * bool(left_out)), *self.value.warnings)

    def lines(self) -> Iterator[RenderableType]:
        """A row for each run that is new or has changed, and their numbers."""
        changes = [item for item in self.value.runs if item.change != "unchanged"]
        if changes:
            yield word_table(
                ("run", "from", "state", "rows", "name"),
                (
                    (
                        item.folder.name, item.run.origin, item.run.state or "going on",
                        str(item.rows), item.run.name,
                    )
                    for item in changes
                ),
            )  # fmt: skip
        counts = {change: self.value.count(change) for change in ("new", "changed", "unchanged")}
        yield (
            f"{counts['new']} new, {counts['changed']} changed and {counts['unchanged']} "
            f"unchanged runs in `{self.given.get('root', RUNS)}`"
        )

    def json_tree(self) -> object:
        """The runs, what was left out, and warnings."""
        rows = [
            {
                "folder": item.folder, "id": item.run.id, "change": item.change,
                "tracker": item.run.origin, "origin_id": item.run.origin_id, "rows": item.rows,
            }
            for item in self.value.runs
        ]  # fmt: skip
        value = self.value
        return {"runs": rows, "left_out": value.left_out, "warnings": list(value.warnings)}


def mirror(
    run: str | Path = "last", /, *places: str, to: Names = (), root: RunsFolder = RUNS
) -> Mirrors:
    """Copy a run into other trackers; copying it again adds only what is new.

    For example: `windlass mirror last --to tensorboard:logs --to csv:steps.csv`.

    Args:
        run: Folder, name, the first characters of its id, or `last`.
        places: Where to, as for `--to`.
        to: Where to, `NAME:PLACE`, several with commas or given several times.
            `tensorboard:FOLDER`, `mlflow:URI`, `wandb:FOLDER` (an offline run, which `wandb sync`
            sends), `trackio:PROJECT`, `csv:FILE`, `parquet:FILE`.
        root: The folder that holds the run folders.

    Raises:
        RecordError: no such run, or a tracker refuses it.
        RequestError: no such target, or its package is not installed.
        StorageError: a target cannot be written.
    """
    return Mirrors(mirror_run(find_run(Path(root), str(run)), (*places, *to)))


def import_runs(
    source: AnyPath,
    *,
    tracker: Annotated[str | None, Parameter(name="--from")] = None,
    root: RunsFolder = RUNS,
) -> Annotated[ImportedRuns, ShownImport]:
    """Take over runs of MLflow, TensorBoard, Trackio or W&B; twice changes nothing.

    Runs that have grown are taken over anew.

    For example: `windlass import-runs mlflow.db`, or `windlass import-runs lightning_logs`.

    Args:
        source: A file or folder of theirs; folders are searched.
        tracker: `mlflow`, `tensorboard`, `trackio` or `wandb`; all that the source holds if not
            given.
        root: The folder that holds the run folders.

    Raises:
        RecordError: it holds no runs, or a file of it cannot be read.
        RequestError: no such tracker.
        StorageError: `root` cannot be written.
    """
    return import_from(Path(source), Path(root), tracker)
