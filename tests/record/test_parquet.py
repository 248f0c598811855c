"""Exports hold every number as the journals do, and no text that runs."""

import csv
import math
import resource
import struct
from pathlib import Path

import duckdb
import pytest
from made_stores import make_run

from windlass.errors import StorageError
from windlass.record.annotations import annotate
from windlass.record.catalog import Catalog
from windlass.record.parquet import csv_cell, export_csv, export_parquet
from windlass.record.run_row import RunQuery, RunRow
from windlass.tracking.run_reader import load_run


def rows(root: Path) -> list[RunRow]:
    with Catalog.open(root) as catalog:
        catalog.refresh()
        return catalog.rows(RunQuery(sort="id"))


def test_parquet_has_every_number_to_the_bit(tmp_path: Path):
    losses = (float("nan"), float("inf"), -0.0, 1e-310, 3.5)
    runs = [make_run(tmp_path / "runs", losses=losses[number:]) for number in range(3)]
    for run in runs:
        run.end("finished")
    _, steps = export_parquet(rows(tmp_path / "runs"), tmp_path / "out")
    query = f"SELECT value FROM '{steps}' WHERE run = ? AND series = 'loss' ORDER BY step"  # noqa: S608
    for run in runs:
        exported = [value for (value,) in duckdb.execute(query, [run.id]).fetchall()]
        journalled = [step.loss for step in load_run(run.path).steps]
        assert [struct.pack("d", v) for v in exported] == [struct.pack("d", v) for v in journalled]


def test_duckdb_joins_runs_and_steps(tmp_path: Path):
    for number in (1, 2, 3):
        run = make_run(tmp_path / "runs", losses=(5.0, 1.0 * number), learning_rate=0.1**number)
        run.end("finished")
    paths = export_parquet(rows(tmp_path / "runs"), tmp_path / "out")
    runs, steps = map(str, paths)
    found = duckdb.execute(
        f"""
        SELECT (settings->>'$."train.learning_rate"')::DOUBLE AS rate, min(value) AS best
        FROM '{runs}' AS runs JOIN '{steps}' AS steps ON steps.run = runs.id
        WHERE series = 'loss' GROUP BY rate ORDER BY best
        """  # noqa: S608
    ).fetchall()
    assert [(round(rate, 6), best) for rate, best in found] == [(0.1, 1), (0.01, 2), (0.001, 3)]


def test_a_store_without_runs_is_exported(tmp_path: Path):
    paths = export_parquet([], tmp_path / "out")
    for path in paths:
        found = duckdb.execute(f"SELECT count(*) FROM '{path}'").fetchall()  # noqa: S608
        assert found == [(0,)]


def test_a_disk_that_gets_full_leaves_no_file_of_an_export(tmp_path: Path):
    losses = tuple(math.sin(number) for number in range(20_000))
    with Catalog.open(tmp_path / "runs") as catalog:
        run = make_run(tmp_path / "runs", losses=())
        for step, loss in enumerate(losses):
            run.journal.append_row(step, {"loss": loss})
        run.end("finished")
        catalog.refresh()
        found = catalog.rows(RunQuery())
    out = tmp_path / "out"
    out.mkdir()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))
    try:
        with pytest.raises(StorageError, match="no space left"):
            export_parquet(found, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(out.iterdir()) == []


@pytest.mark.parametrize("text", ["=cmd|' /C calc'!A0", "+1", "-2", "@SUM(A1)", "\t=1", "\r=1"])
def test_no_text_in_csv_is_a_formula(tmp_path: Path, text: str):
    run = make_run(tmp_path / "runs", meta={"name": text, "group": f"{text}\n{text}"})
    run.end("finished")
    annotate(run.path, tags=[f"={text}"], note=text)
    export_csv(rows(tmp_path / "runs"), tmp_path / "runs.csv")
    with (tmp_path / "runs.csv").open(newline="") as file:
        (line,) = csv.DictReader(file)
    assert (line["name"], line["group"]) == (f"'{text}", f"'{text}\n{text}")
    assert all(not cell or cell[0] not in "=+-@\t\r" for cell in line.values())


def test_numbers_in_csv_are_numbers():
    assert [csv_cell(value) for value in (-1.5, 3, True, None)] == [-1.5, 3, True, ""]
