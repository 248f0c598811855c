"""Copies a run into other trackers; copying it again changes nothing, or adds what is new."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from windlass.errors import RequestError, did_you_mean, shorten
from windlass.integrations.mirrors.mlflow_client import write_mlflow
from windlass.integrations.mirrors.tables import write_csv, write_parquet
from windlass.integrations.mirrors.tensorboard_writer import write_tensorboard
from windlass.integrations.mirrors.trackio_project import write_trackio
from windlass.integrations.mirrors.wandb_run import write_wandb
from windlass.integrations.portable_run import PortableRun
from windlass.integrations.run_copy import read_run
from windlass.schema import (
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    MACHINE_FILE,
    PLAN_FILE,
    PREDICTION_FILE,
    REQUEST_FILE,
)

_Write = Callable[[PortableRun, str, Mapping[str, Path]], str]
"""Writes a run to a target with the run folder's documents by name, and returns where it is."""
_WRITERS: Mapping[str, _Write] = {
    "tensorboard": write_tensorboard,
    "mlflow": write_mlflow,
    "wandb": write_wandb,
    "trackio": write_trackio,
    "csv": write_csv,
    "parquet": write_parquet,
}
_EXAMPLES = {
    "tensorboard": "tensorboard:logs",
    "mlflow": "mlflow:sqlite:///mlflow.db",
    "wandb": "wandb:offline-runs",
    "trackio": "trackio:project",
    "csv": "csv:steps.csv",
    "parquet": "parquet:steps.parquet",
}
MIRRORS = tuple(_EXAMPLES.values())
"""An example of each target."""
_DOCUMENTS = (
    REQUEST_FILE,
    PLAN_FILE,
    PREDICTION_FILE,
    MACHINE_FILE,
    ENVIRONMENT_FILE,
    CONFIG_FILE,
)
"""What goes along as artifacts where the tracker has some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mirror:
    """A copy of a run in another tracker."""

    target: str
    """As it was asked for, such as `csv:steps.csv`."""
    place: str
    """Where it is now, in the words of the tracker."""


def mirror_run(folder: Path, targets: tuple[str, ...]) -> tuple[Mirror, ...]:
    """The copies of one run, one for each target.

    Args:
        folder: the run folder.
        targets: each `NAME:PLACE`; `MIRRORS` has an example of each.

    Raises:
        RequestError: a target is none of these, or its package is not installed.
        RecordError: the folder holds no run, or a tracker refuses it.
        StorageError: a place cannot be written.
    """
    writers = [_writer(target) for target in targets]
    if not writers:
        raise RequestError(f"name where to copy the run to, such as `{MIRRORS[0]}`")
    run = read_run(folder)
    documents = {name: folder / name for name in _DOCUMENTS if (folder / name).is_file()}
    return tuple(
        Mirror(target=target, place=write(run, target.partition(":")[2], documents))
        for target, write in zip(targets, writers, strict=True)
    )


def _writer(target: str) -> _Write:
    name, colon, place = target.partition(":")
    if name not in _WRITERS:
        raise RequestError(
            f"no tracker `{shorten(name)}` to copy a run to; there are {', '.join(MIRRORS)}"
            f"{did_you_mean(name, _WRITERS)}"
        )
    if not colon or not place:
        raise RequestError(f"`{shorten(target)}` names no place; write `{_EXAMPLES[name]}`")
    return _WRITERS[name]
