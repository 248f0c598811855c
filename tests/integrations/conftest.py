"""Stores of other trackers: two small runs with each, made by their own packages."""

import gzip
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

DATA = Path(__file__).parent / "data"


@pytest.fixture
def peer_runs(tmp_path: Path) -> Path:
    """A folder with `mlflow.db`, `trackio/peers.db`, `tensorboard` and `wandb`."""
    folder = tmp_path / "peers"
    (folder / "trackio").mkdir(parents=True)
    for packed, path in (("mlflow", "mlflow.db"), ("trackio-peers", "trackio/peers.db")):
        (folder / path).write_bytes(gzip.decompress((DATA / f"{packed}.db.gz").read_bytes()))
    for name in ("tensorboard", "wandb"):
        shutil.copytree(DATA / name, folder / name)
    for file in DATA.glob("expected.*.json"):
        shutil.copy(file, folder)
    return folder


Series = dict[str, list[tuple[int, str]]]


@pytest.fixture
def expected_series(peer_runs: Path) -> Callable[[str, str], Series]:
    """Step and hexadecimal value of each point by name, as a tracker was given those of a run."""

    def series(tracker: str, seed: str) -> Series:
        kind = "float32" if tracker == "tensorboard" else "float64"
        runs = json.loads((peer_runs / f"expected.{kind}.json").read_text(encoding="utf-8"))
        infinite = sys.float_info.max.hex() if tracker == "mlflow" else "inf"
        return {
            name: [(step, infinite if value == "inf" else value) for step, value in points]
            for name, points in runs[seed].items()
        }

    return series
