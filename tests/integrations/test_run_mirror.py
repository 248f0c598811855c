"""Runs are copied into other trackers to the bit, and again without a change."""

import csv
import math
from collections import Counter
from pathlib import Path

import pyarrow.parquet
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util

from windlass.errors import RequestError
from windlass.integrations import import_runs, init, mirror_run
from windlass.schema import CONFIG_FILE, RunConfig
from windlass.tracking import journal_path, read_journal

VALUES = (0.1 + 0.2, math.pi, 5e-324, -1e300, math.inf, -math.inf, math.nan, 0.0, -0.0)
Point = tuple[int, str, str]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = {"optimizer": {"lr": 0.1 + 0.2}, "name": "x", "amp": True}
    with init(config=config, name="=cmd() <b>", tags=["a=b", "c"], notes="n", root=tmp_path) as run:
        for step, value in enumerate(VALUES, start=3):
            run.log({"loss": value, "=1+1": value / 3}, step=step)
            if step % 4 == 0:
                run.log({"eval/loss": value}, step=step)
    return run.folder


def points(folder: Path) -> Counter[Point]:
    rows = read_journal(journal_path(folder, 0, 1)).rows
    return Counter(
        (row.step, name, value.hex()) for row in rows for name, value in row.values.items()
    )


def test_a_csv_has_every_digit_and_runs_no_formula(folder: Path, tmp_path: Path):
    (mirror,) = mirror_run(folder, (f"csv:{tmp_path / 'steps.csv'}",))
    text = Path(mirror.place).read_text(encoding="utf-8")
    head, *rows = csv.reader(text.splitlines())
    assert head == ["step", "time", "'=1+1", "eval/loss", "loss"]
    names = ["=1+1", "eval/loss", "loss"]
    assert points(folder) == Counter(
        (int(row[0]), name, float(cell).hex())
        for row in rows
        for name, cell in zip(names, row[2:], strict=True)
        if cell
    )
    mirror_run(folder, (f"csv:{tmp_path / 'steps.csv'}",))
    assert Path(mirror.place).read_text(encoding="utf-8") == text


def test_a_parquet_file_has_every_bit_and_the_settings(folder: Path, tmp_path: Path):
    (mirror,) = mirror_run(folder, (f"parquet:{tmp_path / 'steps.parquet'}",))
    table = pyarrow.parquet.read_table(mirror.place)
    assert points(folder) == Counter(
        (row["step"], name, row[name].hex())
        for row in table.to_pylist()
        for name in ("=1+1", "eval/loss", "loss")
        if row[name] is not None
    )
    assert b'"optimizer.lr": 0.30000000000000004' in table.schema.metadata[b"windlass"]


def test_tensorboard_itself_reads_every_bit(folder: Path, tmp_path: Path):
    (mirror,) = mirror_run(folder, (f"tensorboard:{tmp_path / 'logs'}",))
    reader = EventAccumulator(str(Path(mirror.place).parent), {"tensors": 0})
    reader.Reload()
    tags = set(reader.Tags()["tensors"])
    assert tags == {"=1+1", "eval/loss", "loss", "_hparams_/session_start_info"}
    assert points(folder) == Counter(
        (event.step, tag, float(tensor_util.make_ndarray(event.tensor_proto)).hex())
        for tag in ("=1+1", "eval/loss", "loss")
        for event in reader.Tensors(tag)
    )


def test_a_copy_comes_back_as_it_went(folder: Path, tmp_path: Path):
    target = f"tensorboard:{tmp_path / 'logs'}"
    (mirror,) = mirror_run(folder, (target,))
    content = Path(mirror.place).read_bytes()
    mirror_run(folder, (target,))
    assert [f.read_bytes() for f in (tmp_path / "logs").rglob("*") if f.is_file()] == [content]
    (back,) = import_runs(tmp_path / "logs", tmp_path / "back").runs
    assert points(back.folder) == points(folder)
    assert RunConfig.load(back.folder / CONFIG_FILE) == RunConfig.load(folder / CONFIG_FILE)


def test_tensorboard_sees_what_a_longer_run_adds(tmp_path: Path):
    target = (f"tensorboard:{tmp_path / 'logs'}",)
    run = init(folder=tmp_path / "run")
    run.log({"loss": 1.0})
    (mirror,) = mirror_run(run.folder, target)
    reader = EventAccumulator(str(Path(mirror.place).parent), {"tensors": 0})
    reader.Reload()
    run.log({"loss": 0.5})
    run.finish()
    assert mirror_run(run.folder, target) == (mirror,)
    reader.Reload()
    assert [event.step for event in reader.Tensors("loss")] == [1, 2]


def test_an_unknown_target_is_refused_before_anything_is_written(folder: Path, tmp_path: Path):
    good = f"csv:{tmp_path / 'steps.csv'}"
    with pytest.raises(RequestError, match=r"no tracker `mlfow`.*did you mean `mlflow`\?"):
        mirror_run(folder, (good, "mlfow:sqlite:///x.db"))
    with pytest.raises(RequestError, match=r"`csv` names no place; write `csv:steps\.csv`"):
        mirror_run(folder, (good, "csv"))
    with pytest.raises(RequestError, match="name where to copy the run to"):
        mirror_run(folder, ())
    assert not (tmp_path / "steps.csv").exists()
