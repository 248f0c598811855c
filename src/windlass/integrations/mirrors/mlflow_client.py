"""Writes a run to MLflow by its client; the tag `windlass.uid` finds it again."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from windlass.errors import RecordError, RequestError
from windlass.integrations.portable_run import PortableRun
from windlass.tracking import JournalRow

T = TypeVar("T")
_UID = "windlass.uid"
_SENT = "windlass.rows"
"""Tag with the number of rows that the copy has, and their digest."""
_EXPERIMENT = "windlass"
_BATCH_METRICS, _BATCH_PARAMS = 1000, 100
_MAX_NAME, _MAX_VALUE = 250, 6000
"""Characters of a name and of a param's value; MLflow cuts or refuses more."""
_STATES = {"finished": "FINISHED", "broken": "FAILED", "interrupted": "KILLED", "killed": "KILLED"}


def write_mlflow(run: PortableRun, place: str, documents: Mapping[str, Path]) -> str:
    """Writes a run to the store at a tracking URI, and returns MLflow's id of it.

    Writing again adds the rows that are new; should it be cut off, MLflow keeps equal metrics once.
    The plan and the other documents become artifacts, because MLflow cuts params at 6,000
    characters.

    Raises:
        RequestError: mlflow is not installed.
        RecordError: MLflow refuses the run.
    """
    try:
        mlflow, entities = import_module("mlflow"), import_module("mlflow.entities")
    except ImportError:
        raise RequestError(
            "`mlflow:` needs MLflow's client; install it by `pip install mlflow-skinny`, or by "
            "`pip install mlflow` for a store in a file"
        ) from None
    try:
        return _write(mlflow.MlflowClient(place), entities, run, documents)
    except mlflow.exceptions.MlflowException as error:
        raise RecordError(f"MLflow at `{place}` refuses the run: {_first_line(error)}") from None


def _write(
    client: Any,  # noqa: ANN401  of a package without types
    entities: ModuleType,
    run: PortableRun,
    documents: Mapping[str, Path],
) -> str:
    name = run.project or _EXPERIMENT
    experiment = client.get_experiment_by_name(name)
    experiment_id = experiment.experiment_id if experiment else client.create_experiment(name)
    copies = client.search_runs([experiment_id], f"tags.`{_UID}` = '{run.origin_id}'")
    if copies:
        copy = copies[0]
    else:
        start = round(run.started * 1000)
        tags = {_UID: run.origin_id, "mlflow.runName": run.name}
        copy = client.create_run(experiment_id, start_time=start, tags=tags)
    run_id = copy.info.run_id
    # MLflow takes a param once; the artifacts have the settings as they are now.
    params = {name: text for name, text in _params(run) if name not in copy.data.params}
    for batch in _batches(params.items(), _BATCH_PARAMS):
        client.log_batch(run_id, params=[entities.Param(*param) for param in batch])
    for key, value in _tags(run):
        client.set_tag(run_id, key, value)
    unsent = _unsent_rows(run.rows, copy.data.tags.get(_SENT, ""))
    for metrics in _batches(_metrics(unsent), _BATCH_METRICS):
        client.log_batch(run_id, metrics=[entities.Metric(*metric) for metric in metrics])
    client.set_tag(run_id, _SENT, f"{len(run.rows)} {_digest(run.rows)}")
    for path in documents.values():
        client.log_artifact(run_id, str(path))
    if run.state is not None:
        client.set_terminated(run_id, _STATES[run.state], end_time=round(run.ended * 1000))
    return f"{name}/{run_id}"


def _params(run: PortableRun) -> Iterator[tuple[str, str]]:
    for key, value in run.config.items():
        text = value if isinstance(value, str) else json.dumps(value)
        if text and len(text) <= _MAX_VALUE:  # longer ones are whole in the artifacts
            yield _name(key), text


def _tags(run: PortableRun) -> Iterator[tuple[str, str]]:
    """Tags without a value are those with the value `true`."""
    for tag in run.tags:
        key, equals, value = tag.partition("=")
        yield (_name(key) or "tag", value) if equals else (_name(tag), "true")
    if run.notes:
        yield "mlflow.note.content", run.notes
    if run.group:
        yield "windlass.group", run.group


def _unsent_rows(rows: Sequence[JournalRow], sent: str) -> Sequence[JournalRow]:
    """The rows behind those that the copy has; all, if those have changed since.

    MLflow takes equal metrics again and keeps them once, ten times as slowly as new ones.
    """
    count, _, digest = sent.partition(" ")
    number = int(count) if count.isdecimal() else 0
    return rows[number:] if digest == _digest(rows[:number]) else rows


def _digest(rows: Sequence[JournalRow]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(f"{row.step} {row.time!r} {sorted(row.values.items())!r}".encode())
    return digest.hexdigest()[:16]


def _metrics(rows: Sequence[JournalRow]) -> Iterator[tuple[str, float, int, int]]:
    for row in rows:
        for name, value in row.values.items():
            yield _name(name), value, round(row.time * 1000), row.step


def _name(name: str) -> str:
    """A name as MLflow takes it: some characters become underscores."""
    return re.sub(r"[^\w\-. /]", "_", name, flags=re.ASCII)[:_MAX_NAME].strip("/ ") or "_"


def _batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
