"""Takes over runs of other trackers as run folders; taking them over twice changes nothing."""

import contextlib
import os
import struct
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal, get_args

from windlass.atomic_files import atomic_write, hash_file, storage_errors
from windlass.errors import RecordError, RequestError, did_you_mean, shorten
from windlass.integrations.imports.sqlite_stores import (
    SQLITE_HEAD,
    read_mlflow,
    read_trackio,
    sqlite_tracker,
)
from windlass.integrations.imports.tensorboard_events import EVENT_FILE, read_tensorboard
from windlass.integrations.imports.wandb_offline import WANDB_HEAD, read_wandb
from windlass.integrations.portable_run import PortableRun, Tracker
from windlass.record import annotate
from windlass.schema import CONFIG_FILE, RunConfig
from windlass.tracking import (
    JournalWriter,
    calendar_time,
    journal_path,
    read_run_id,
    run_folder_name,
    write_run_id,
)

TRACKERS: tuple[Tracker, ...] = get_args(Tracker)
Change = Literal["new", "changed", "unchanged"]
_MAX_TAG, _MAX_NOTE = 200, 20_000
"""Characters of a tag and a note in the record."""
_Files = Mapping[Tracker, list[Path]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedRun:
    """One run that was taken over."""

    folder: Path
    run: PortableRun
    """Without its rows."""
    rows: int
    """Number of its rows."""
    change: Change
    """What the import did to the folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedRuns:
    """What one import did."""

    runs: tuple[ImportedRun, ...]
    left_out: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """How many things of each kind were not taken over, of all runs."""
    warnings: tuple[str, ...] = ()
    """A sentence for each file, or run, that could not be read at all."""

    def count(self, change: Change) -> int:
        """Number of runs with one outcome."""
        return sum(run.change == change for run in self.runs)


def import_runs(source: Path, root: Path, tracker: str | None = None) -> ImportedRuns:
    """The runs of another tracker, each written as a run folder under `root`.

    The same run has the same id and the same bytes each time. One that has grown since the last
    import replaces what was imported of it; an older copy of it changes nothing.

    Args:
        source: a file or folder of MLflow, TensorBoard, Trackio or W&B; folders are searched.
        root: the folder that holds the run folders.
        tracker: one of `TRACKERS`; None takes all that `source` holds.

    Raises:
        RequestError: no such tracker.
        RecordError: `source` holds no runs, or a file of it cannot be read.
        StorageError: `root` cannot be written.
    """
    if tracker is not None and tracker not in TRACKERS:
        raise RequestError(
            f"no tracker `{shorten(tracker)}`; runs are imported from {', '.join(TRACKERS)}"
            f"{did_you_mean(tracker, TRACKERS)}"
        )
    warnings: list[str] = []
    files = _tracker_files(source, warnings)
    chosen = {kind: paths for kind, paths in files.items() if tracker in (None, kind)}
    if not chosen:
        raise RecordError(warnings[0]) if warnings else _nothing_to_import(source, files, tracker)
    present = _folders_by_id(root)
    runs: list[ImportedRun] = []
    left_out: Counter[str] = Counter()
    for run in _read_runs(chosen, warnings):
        with _told_in(warnings):
            runs.append(_write_run(run, root, present.get(run.id)))
            present[run.id] = runs[-1].folder
            left_out.update(run.left_out)
    if warnings and not runs:
        raise RecordError(warnings[0])
    return ImportedRuns(runs=tuple(runs), left_out=left_out, warnings=tuple(warnings))


@contextlib.contextmanager
def _told_in(warnings: list[str]) -> Iterator[None]:
    """Goes on with the next file or run behind one that cannot be read."""
    try:
        yield
    except RecordError as error:
        warnings.append(str(error))


def _nothing_to_import(source: Path, files: _Files, tracker: str | None) -> RecordError:
    if not source.exists():
        return RecordError(f"`{shorten(str(source))}` does not exist; name a file or a folder")
    if tracker is not None and files:
        return RecordError(
            f"`{source}` holds runs of {', '.join(files)} and none of {tracker}; leave out `--from`"
        )
    if any(path.name == "meta.yaml" for path in _files(source)):
        return RecordError(
            f"`{source}` is a folder store of MLflow, which MLflow itself has left; turn it into a "
            "SQLite file by `mlflow migrate-filestore`, and import that"
        )
    return RecordError(
        f"`{source}` holds no runs; import reads MLflow's and Trackio's SQLite files (`.db`), "
        "TensorBoard's event files and W&B's `.wandb` files"
    )


def _tracker_files(source: Path, warnings: list[str]) -> _Files:
    """The files below `source` that hold runs, by the tracker that wrote them."""
    files: defaultdict[Tracker, list[Path]] = defaultdict(list)
    for path in _files(source):
        with _told_in(warnings):
            kind = _tracker_of(path)
            if kind is not None:
                files[kind].append(path)
    return files


def _files(source: Path) -> Iterator[Path]:
    """Regular files in order; links are not followed, so that no file is read twice."""
    if source.is_file():
        yield source
    for folder, folders, names in os.walk(source):
        folders.sort()
        for name in sorted(names):
            path = Path(folder, name)
            if path.is_file() and not path.is_symlink():
                yield path


def _tracker_of(path: Path) -> Tracker | None:
    """The tracker that wrote a file, by its name and its first bytes; None if it is of none."""
    if EVENT_FILE in path.name:
        return "tensorboard"
    if path.suffix not in (".db", ".sqlite", ".sqlite3", ".wandb"):
        return None
    try:
        with path.open("rb") as file:
            head = file.read(len(SQLITE_HEAD))
    except OSError as error:
        raise RecordError(f"`{path}` cannot be read: {error.strerror}") from None
    if head.startswith(WANDB_HEAD):
        return "wandb"
    return sqlite_tracker(path) if head == SQLITE_HEAD else None


def _read_runs(files: _Files, warnings: list[str]) -> Iterator[PortableRun]:
    """All runs that can be read, and a sentence for each file that cannot."""
    readers = {"mlflow": read_mlflow, "trackio": read_trackio}
    for kind in ("mlflow", "trackio"):
        for path in files.get(kind, ()):
            with _told_in(warnings):
                yield from readers[kind](path)
    yield from read_wandb(files.get("wandb", ()), warnings)
    folders: defaultdict[Path, list[Path]] = defaultdict(list)
    for path in files.get("tensorboard", ()):
        folders[path.parent].append(path)
    for folder, paths in folders.items():
        with _told_in(warnings):
            yield read_tensorboard(folder, paths)


def _folders_by_id(root: Path) -> dict[str, Path]:
    """The run folders under `root` by the ids of their runs."""
    folders: dict[str, Path] = {}
    if root.is_dir():
        for folder in sorted(root.iterdir()):
            try:
                folders[read_run_id(folder)] = folder
            except RecordError:
                continue
    return folders


def write_run(run: PortableRun, root: Path) -> ImportedRun:
    """Writes one run as a folder under `root`; writing it twice changes nothing.

    Raises:
        RecordError: it has more than a journal can hold.
        StorageError: `root` cannot be written.
    """
    return _write_run(run, root, _folders_by_id(root).get(run.id))


def _write_run(run: PortableRun, root: Path, present: Path | None) -> ImportedRun:
    """Writes one run to a folder aside, and moves what is new or has changed to its place."""
    with storage_errors(root):
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root, prefix=".import-") as aside:
            draft = Path(aside) / "run"
            _write_files(run, draft)
            if present is None:
                folder = root / run_folder_name(run.name, run.id, run.start)
                if folder.exists():  # of another run whose id ends alike
                    folder = folder.with_name(f"{folder.name}-{run.id}")
                draft.rename(folder)
                change: Change = "new"
            else:
                folder, change = present, _replace_changed(draft, present)
    return ImportedRun(folder=folder, run=replace(run, rows=()), rows=len(run.rows), change=change)


def _write_files(run: PortableRun, folder: Path) -> None:
    """Writes a run folder whose bytes depend on the run only: all times in it are the run's own."""
    documents = {CONFIG_FILE: RunConfig(values=dict(run.config)), **run.documents}
    for name, document in documents.items():
        document.save(folder / name)
    with JournalWriter(journal_path(folder, 0, 1)) as journal:
        journal.append_event("meta", {"time": run.start, **_meta(run)})
        seal = {name: hash_file(folder / name) for name in documents}
        journal.append_event("seal", {"time": run.start, "files": seal})
        try:
            for row in run.rows:
                journal.append_row(row.step, row.values, timestamp=calendar_time(row.time))
        except struct.error:
            raise RecordError(
                f"run `{shorten(run.name)}` of {run.origin} has more sets of names than a journal "
                "can number, or a step beyond 64 bits; leave it out of the source"
            ) from None
        if run.state is not None:
            end = {
                "time": calendar_time(run.ended),
                "state": run.state,
                "left_out": dict(run.left_out),
            }
            journal.append_event("end", end)
    tags = [tag[:_MAX_TAG] for tag in run.tags if tag.strip()]
    note = run.notes[:_MAX_NOTE] if run.notes.strip() else None
    if tags or note:
        # One change of one name: what people add afterwards counts after it.
        annotate(folder, tags=tags, note=note, change_id=run.id)
    write_run_id(folder, run.id)


def _meta(run: PortableRun) -> dict[str, object]:
    """The fields of the opening event; what is not known is left out."""
    model = run.config.get("model")
    meta = {
        "id": run.id,
        "attempt": 1,
        "name": run.name,
        "model": model if isinstance(model, str) else run.name,
        "origin": run.origin,
        "origin_id": run.origin_id,
        "project": run.project,
        "group": run.group,
        "machine": run.facts.get("host"),
        "facts": dict(run.facts),
        **run.meta,
    }
    return {key: value for key, value in meta.items() if value not in (None, "", [], {})}


def _replace_changed(draft: Path, folder: Path) -> Change:
    """Moves the files that differ to their places, the journal last; a shorter draft is older."""
    journal = journal_path(folder, 0, 1)
    shorter = journal_path(draft, 0, 1).stat().st_size < len(_content(journal) or b"")
    files = sorted(draft.rglob("*.j*"), key=lambda file: (file.suffix == ".j", file.name))
    names = [file.relative_to(draft) for file in files]
    changed = [name for name in names if _content(draft / name) != _content(folder / name)]
    if shorter or not changed:
        return "unchanged"
    for name in changed:
        atomic_write(folder / name, (draft / name).read_bytes())
    return "changed"


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None
