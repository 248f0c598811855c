"""Reads the SQLite stores of MLflow and Trackio, without either package."""

import json
import math
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from datetime import datetime
from pathlib import Path

from windlass.errors import RecordError
from windlass.integrations.portable_run import (
    PortableRun,
    Tracker,
    clean_text,
    flat_config,
    number,
    rows_of_points,
)
from windlass.schema import RunState
from windlass.tracking import JournalRow

SQLITE_HEAD = b"SQLite format 3\0"
_MLFLOW_STATES: Mapping[str, RunState] = {
    "FINISHED": "finished",
    "FAILED": "broken",
    "KILLED": "interrupted",
}
_MLFLOW_FACTS = {"mlflow.user": "user", "mlflow.source.name": "program",
                 "mlflow.source.git.commit": "commit", "mlflow.parentRunId": "parent"}  # fmt: skip
_MLFLOW_NOTE = "mlflow.note.content"
_TABLES: Mapping[Tracker, frozenset[str]] = {
    "mlflow": frozenset({"runs", "metrics", "params", "tags", "experiments"}),
    "trackio": frozenset({"metrics", "configs"}),
}
_MOST_VALUE_BYTES = 2**26
"""Largest text of a store that is read."""


def sqlite_tracker(path: Path) -> Tracker | None:
    """Which tracker's store a SQLite file is; None if it is neither's.

    Raises:
        RecordError: the file is damaged.
    """
    with _open(path, "a tracker") as store:
        kinds = dict(store.execute("SELECT name, type FROM sqlite_master").fetchall())
    needed = next((names for names in _TABLES.values() if names <= kinds.keys()), frozenset())
    if views := sorted(name for name in needed if kinds[name] != "table"):
        raise RecordError(
            f"`{path}` has a {kinds[views[0]]} `{views[0]}` where a tracker has a table, and it "
            "may have no end; copy the file again from where it was written"
        )
    return next((tracker for tracker, names in _TABLES.items() if needed == names), None)


def read_mlflow(path: Path) -> Iterator[PortableRun]:
    """All runs of an MLflow store but those that were deleted, in the order of their ids.

    Raises:
        RecordError: the file is damaged, or another program keeps it locked.
    """
    with _open(path, "MLflow") as store:
        names = dict(store.execute("SELECT experiment_id, name FROM experiments").fetchall())
        runs = store.execute("SELECT * FROM runs ORDER BY run_uuid").fetchall()
        for run in runs:
            if run["lifecycle_stage"] == "active":
                yield _mlflow_run(store, run, names.get(run["experiment_id"]))


def _mlflow_run(store: sqlite3.Connection, run: sqlite3.Row, project: object) -> PortableRun:
    run_id = str(run["run_uuid"])
    tags = dict(
        store.execute("SELECT key, value FROM tags WHERE run_uuid = ?", (run_id,)).fetchall()
    )
    params = store.execute(
        "SELECT key, value FROM params WHERE run_uuid = ? ORDER BY key", (run_id,)
    ).fetchall()
    left_out: Counter[str] = Counter()
    rows = rows_of_points(_mlflow_points(store, run_id, left_out))
    started, end = ((number(run[key]) or 0.0) / 1000 for key in ("start_time", "end_time"))
    return PortableRun(
        origin="mlflow",
        origin_id=run_id,
        name=clean_text(str(run["name"] or tags.get("mlflow.runName") or run_id)),
        rows=rows,
        started=started,
        ended=end or _last_time(rows, started),
        state=_MLFLOW_STATES.get(str(run["status"])),
        config=flat_config(dict(params)),
        tags=tuple(
            clean_text(f"{key}={value}" if value else str(key))
            for key, value in sorted(tags.items())
            if not str(key).startswith(("mlflow.", "windlass."))
        ),
        notes=clean_text(str(tags.get(_MLFLOW_NOTE, ""))),
        project=clean_text(str(project)) if project is not None else None,
        group=clean_text(str(project)) if project is not None else None,
        facts={
            name: clean_text(str(tags[tag])) for tag, name in _MLFLOW_FACTS.items() if tag in tags
        },
        left_out=left_out,
    )


def _mlflow_points(
    store: sqlite3.Connection, run_id: str, left_out: Counter[str]
) -> Iterator[tuple[int, float, str, float]]:
    """The metrics of a run in the order in which they were logged; times are in milliseconds."""
    query = (
        "SELECT step, timestamp, key, value, is_nan FROM metrics WHERE run_uuid = ? ORDER BY rowid"
    )
    for step, timestamp, key, value, is_nan in store.execute(query, (run_id,)):
        if isinstance(value, int | float) and isinstance(step, int) and isinstance(timestamp, int):
            exact = math.nan if is_nan else float(value)
            yield step, timestamp / 1000, clean_text(str(key)), exact
        else:
            left_out["metrics that are no numbers"] += 1


def read_trackio(path: Path) -> Iterator[PortableRun]:
    """All runs of the SQLite file of a Trackio project, in the order of their ids.

    Raises:
        RecordError: the file is damaged, or another program keeps it locked.
    """
    with _open(path, "Trackio") as store:
        columns = {row[1] for row in store.execute("PRAGMA table_info(metrics)")}
        key = "run_id" if "run_id" in columns else "run_name"  # no user's text
        query = f"SELECT DISTINCT {key}, run_name FROM metrics ORDER BY {key}, run_name"  # noqa: S608
        for run_id, name in store.execute(query).fetchall():
            yield _trackio_run(store, key, str(run_id), str(name), path.stem)


def _trackio_run(
    store: sqlite3.Connection, key: str, run_id: str, name: str, project: str
) -> PortableRun:
    left_out: Counter[str] = Counter()
    metrics = f"SELECT step, timestamp, metrics FROM metrics WHERE {key} = ? ORDER BY id"  # noqa: S608
    rows = tuple(
        row
        for step, timestamp, logged in store.execute(metrics, (run_id,))
        if (row := _trackio_row(step, timestamp, logged, left_out)).values
    )
    configs = f"SELECT config FROM configs WHERE {key} = ?"  # noqa: S608
    kept = store.execute(configs, (run_id,)).fetchone()
    config = flat_config(_json_object(kept[0])) if kept else {}
    group = config.get("_Group")
    times = [row.time for row in rows]
    return PortableRun(
        origin="trackio",
        origin_id=f"{project}/{run_id}",
        name=clean_text(name),
        rows=rows,
        started=min(times, default=0.0),
        ended=max(times, default=0.0),
        state="finished",  # Trackio does not say how a run ended
        config={name: value for name, value in config.items() if not name.startswith("_")},
        project=clean_text(project),
        group=group if isinstance(group, str) else clean_text(project),
        left_out=left_out,
    )


def _trackio_row(
    step: object, timestamp: object, metrics: str | bytes, left_out: Counter[str]
) -> JournalRow:
    values: dict[str, float] = {}
    for name, value in flat_config(_json_object(metrics)).items():
        exact = number(value)
        if exact is None:
            left_out["values that are no numbers"] += 1
        else:
            values[name] = exact
    try:
        time = datetime.fromisoformat(str(timestamp)).timestamp()
    except (ValueError, OverflowError):
        left_out["times"] += 1
        time = 0.0
    return JournalRow(step=step if isinstance(step, int) else 0, time=time, values=values)


def _json_object(content: str | bytes) -> Mapping[str, object]:
    """A JSON object; empty if the text is none."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _last_time(rows: tuple[JournalRow, ...], default: float) -> float:
    return max((row.time for row in rows), default=default)


@contextmanager
def _open(path: Path, owner: str) -> Iterator[sqlite3.Connection]:
    """A store that is only read, also while its owner writes it."""
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as store:
            store.row_factory = sqlite3.Row
            store.text_factory = lambda content: content.decode(errors="replace")
            store.execute("PRAGMA trusted_schema = OFF")
            store.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MOST_VALUE_BYTES)
            yield store
    except (sqlite3.Error, IndexError, ValueError, TypeError) as error:
        raise RecordError(
            f"`{path}` cannot be read as a store of {owner}: {error}; copy it again from where it "
            "was written"
        ) from None
