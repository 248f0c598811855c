"""A diff of runs names exactly the inputs that differ, and weighs results against the noise."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import windlass
from windlass.judge import NoiseFloor, diff_runs
from windlass.record import Catalog, RunRow
from windlass.report import run_diff_page

STEPS = (
    "train.steps=2", "train.batch=2", "train.sequence=16", "model.layers=1", "compile=false",
    "model.width=32", "model.heads=2", "model.vocabulary=257", "data.tokenizer=byte",
    "data.limit_bytes=65536",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("diff")
    made = windlass.train("gpt-tiny", *STEPS, root=root)
    list(made)
    return made.folder


def replaced(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1))

    return change


def with_package(folder: Path) -> None:
    path = folder / "environment.json"
    content = json.loads(path.read_text())
    content["packages"]["numpy"] = "0.0.1"
    path.write_text(json.dumps(content))


def with_changed_code(folder: Path) -> None:
    path = folder / "code.json"
    content = json.loads(path.read_text())
    content["windlass"] |= {"diff": "+x = 1\n", "diff_sha256": "0" * 64}
    path.write_text(json.dumps(content))


def with_other_tokens(folder: Path) -> None:
    path = folder / "data.json"
    content = json.loads(path.read_text())
    content["train"]["tokens_sha256"] = "0" * 64
    path.write_text(json.dumps(content))


CHANGES = {
    "request": (replaced("request.toml", "layers = 1", "layers = 3"), "model.layers"),
    "plan": (replaced("plan.toml", 'recompute = "', 'recompute = "x'), None),
    "graph": (replaced("graph.json", '"name":"', '"name":"x'), None),
    "machine": (replaced("machine.toml", "name = ", "devices = 2\nname = "), None),
    "environment": (with_package, "packages.numpy"),
    "code": (with_changed_code, "windlass.diff_sha256"),
    "data": (with_other_tokens, "train.tokens_sha256"),
}


def rows(folder: Path) -> list[RunRow]:
    with Catalog.open(folder) as catalog:
        catalog.refresh()
        return catalog.rows()


@pytest.mark.parametrize("name", CHANGES)
def test_exactly_the_input_that_differs_is_named(run: Path, tmp_path: Path, name: str) -> None:
    change, key = CHANGES[name]
    for copy in ("a", "b"):
        shutil.copytree(run, tmp_path / copy / run.name)
    change(tmp_path / "b" / run.name)
    one, other = rows(tmp_path / "a")[0], rows(tmp_path / "b")[0]
    found = diff_runs([one, other], {})
    assert found.differing == (name,)
    assert {difference.input for difference in found.keys} == {name} or not found.keys
    assert key is None or key in {difference.key for difference in found.keys}
    assert diff_runs([one, one], {}).differing == ()


def test_a_difference_is_told_in_units_of_the_noise(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / run.name)
    row = replace(rows(tmp_path)[0], seconds=1.0)
    floor = {"seconds": NoiseFloor(deviation=0.01, peers=7)}
    slower = replace(row, seconds=1.1)
    result = next(r for r in diff_runs([row, slower], floor).results if r.name == "seconds")
    # ln(1.1) in units of the deviation of a difference of two runs, sqrt(2) x 1 %
    assert result.sigmas(1) == pytest.approx(6.74, abs=0.01)
    assert result.sigmas(0) == 0


def test_names_on_the_page_run_no_script(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / run.name)
    row = rows(tmp_path)[0]
    hostile = replace(row, name="<script>alert(1)</script>", model="<img src=x onerror=y>")
    page = run_diff_page(diff_runs([row, hostile], {}))
    assert "<script" not in page
    assert "<img" not in page
