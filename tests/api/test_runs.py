"""`windlass.runs` gives a table that other libraries take."""

from pathlib import Path

import pandas as pd
import polars as pl
import pytest

import windlass
from windlass.errors import InputErrors, RecordError
from windlass.tracking.run_folder import create_run_folder

REQUEST = "[train]\nlearning_rate = {rate}\nsteps = 3\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for number in (1, 2, 3):
        meta = {"model": "gpt-tiny", "machine": "here"}
        with create_run_folder(tmp_path, "gpt-tiny", documents={}, meta=meta) as run:
            (run.path / "request.toml").write_text(REQUEST.format(rate=0.1 * number))
            run.journal.append_row(3, {"loss": float(number), "seconds": 0.5})
            run.end("finished")
    return tmp_path


def test_pandas_and_polars_take_the_table(root: Path):
    runs = windlass.runs("loss < 3", root=root, sort="loss")
    pandas, polars = pd.DataFrame(runs.to_dict()), pl.DataFrame(runs.to_dict())
    for frame in (pandas, polars):
        assert list(frame["loss"]) == [1.0, 2.0]
        assert list(frame["train.learning_rate"]) == [0.1, 0.2]
        assert list(frame["state"]) == ["finished"] * 2
    assert len(polars) == len(runs) == 2
    assert repr(runs) == "<2 runs>"


def test_a_notebook_shows_the_runs(root: Path):
    html = windlass.runs(root=root)._repr_html_()
    assert html.count("gpt-tiny") == 3


def test_a_run_is_annotated_and_found_again(root: Path):
    last = windlass.runs(root=root, limit=1)[0]
    annotations = windlass.annotate("last", root=root, tags=["best"], note="see figure 3")
    assert annotations.tags == ("best",)
    assert [run.id for run in windlass.runs("tag = 'best'", root=root)] == [last.id]
    with pytest.raises(RecordError, match="no run `nothing`"):
        windlass.annotate("nothing", root=root, tags=["best"])
    with pytest.raises(InputErrors, match="no run has `lost`"):
        windlass.runs("lost < 3", root=root)


def test_the_table_is_written_as_parquet(root: Path, tmp_path: Path):
    runs, steps = windlass.runs(root=root).to_parquet(tmp_path / "analysis")
    assert pl.read_parquet(runs)["loss"].to_list() == [3.0, 2.0, 1.0]
    values = pl.read_parquet(steps).filter(pl.col("series") == "loss")["value"]
    assert values.to_list() == [3.0, 2.0, 1.0]


def test_a_page_that_cannot_stand_in_the_folder_of_the_run_is_written_to_the_current_one(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    folder = windlass.load("last", root=root).folder
    (folder / "report.html").mkdir()  # a folder of root's is never read-only to root
    page = windlass.report("last", root=root)
    assert page == Path(f"{folder.name}.html")
    assert page.read_text().startswith("<!DOCTYPE html>")
