"""No command runs code, or sets variables, that came with a record of another host.

Who names a record's folder to `train`, `resume`, `sample`, `chat`, `export`, `evaluate`, `plan` or
`check` asks for its model, and so for its code. Every other command is tried here.
"""

import http.client
import json
import os
import pickle
import shutil
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest

import windlass
from command_line import TINY, run_here
from made_cache import made_cache
from windlass.api import recorded_code
from windlass.cli.main import _COMMANDS
from windlass.record import Catalog
from windlass.server import Access, Analyses, RecordServer, listen, serve_app

RUNS_IT = {"train", "resume", "sample", "chat", "export", "evaluate", "plan", "check"}
TAKES_NO_FOLDER = {
    "recipe", "largest-model", "validate", "probe", "doctor", "fit", "batch", "smallest-machine",
    "dataflow", "rehearse", "launch", "keys", "models", "machines", "stacks",
}  # fmt: skip
"""They take a model or a machine by its name, and nothing of a record."""
REFUSES = {"noise", "adopt", "bisect", "import", "import-runs"}
LINES = {
    "show": ["show {run}", "show {run} --json"],
    "report": ["report {run} --out {out}/page.html", "report {run} --trace {out}/trace.json"],
    "judge": ["judge {run}", "judge {run} --json"],
    "noise": ["noise {run}"],
    "diff": [
        "diff {run} {other} --runs {root}",
        "diff {run} {other} --page {out}/d.html --runs {root}",
    ],
    "bisect": ["bisect {run} {other}", "bisect {run} {other} --metric loss --steps 1"],
    "runs": [
        "runs --runs {root}", "runs export {out}/runs.csv --runs {root}",
        "runs tag {run} good", "runs note {run} text",
    ],
    "merge": ["merge {root} --into {out}/merged"],
    "sync": ["sync {out}/synced --runs {root}"],
    "mirror": ["mirror {run} --to tensorboard:{out}/logs"],
    "adopt": ["adopt {run} --stack torchtitan --runs {out}/adopted"],
    "import": ["import {run} --runs {out}/imported"],
    "import-runs": ["import-runs {run} --runs {out}/imported"],
    "sweep": ["sweep show --runs {root}"],
    "data": ["data {run}"],
}  # fmt: skip


class Canary:
    """A pickle that writes a file when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self._mark),)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs, and the data folder of the host that made them."""
    home = tmp_path_factory.mktemp("made")
    (home / "text").write_text("to be or not to be " * 400)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(home / "data"))
        patch.setenv("XDG_CACHE_HOME", str(made_cache(tmp_path_factory)))
        for rate in (1e-3, 1e-2):
            list(
                windlass.train(
                    *TINY, "train.steps=2", f"data.source={home}/text",
                    f"train.learning_rate={rate}", root=home / "runs",
                )
            )  # fmt: skip
    return home / "runs", home / "data"


def foreign_runs(made: Path, root: Path, mark: Path) -> list[Path]:
    """The runs as another host sends them, with a canary wherever something could run."""
    shutil.copytree(made, root)
    folders = sorted(folder for folder in root.iterdir() if (folder / "id").exists())
    code = f"import os\nos.mkdir({str(mark)!r})\n"
    for folder in folders:
        request = (folder / "request.toml").read_text()
        assert f'name = "{TINY[0]}"' in request
        model = f"{folder}/model.py:build"
        (folder / "request.toml").write_text(request.replace(TINY[0], model))
        for name in ("sitecustomize.py", "conftest.py", "numbers.py", "model.py", "loader.py"):
            (folder / name).write_text(code)
        for name in ("data.pkl", "step.pt", "pytorch_model.bin"):
            (folder / name).write_bytes(pickle.dumps(Canary(mark)))
        shutil.copy(folder / "data.pkl", next((folder / "checkpoints").iterdir()) / "state.pt")
        (folder / "chat_template.jinja").write_text(
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
        )
        environment = json.loads((folder / "environment.json").read_text())
        environment["variables"] = {"PYTHONPATH": str(folder), "LD_PRELOAD": "", "CUDA_X": "1"}
        (folder / "environment.json").write_text(json.dumps(environment))
        content = json.loads((folder / "code.json").read_text())
        files = [{"name": name, "sha256": "0" * 64, "text": code}
                 for name in ("src/windlass/__init__.py", "sitecustomize.py")]  # fmt: skip
        for tree in filter(None, (content["windlass"], content.get("project"))):
            tree["untracked"] = files
        (folder / "code.json").write_text(json.dumps(content))
    return folders


def surroundings_of(place: Path) -> dict[str, str]:
    names = {name: str(place / name) for name in ("XDG_CACHE_HOME", "XDG_DATA_HOME")}
    return os.environ | names | {"COLUMNS": "200"}


def test_every_command_is_tried() -> None:
    commands = {name for group in _COMMANDS.values() for name in group}
    assert commands == RUNS_IT | TAKES_NO_FOLDER | LINES.keys() | {"serve"}


@pytest.fixture(scope="module")
def foreign(
    made: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[Path], Path]:
    mark = tmp_path_factory.mktemp("canary") / "mark"
    return foreign_runs(made[0], tmp_path_factory.mktemp("foreign") / "runs", mark), mark


@pytest.mark.parametrize("command", LINES)
def test_a_foreign_record_runs_nothing(
    foreign: tuple[list[Path], Path], tmp_path: Path, command: str
) -> None:
    (run, other), mark = foreign
    names = {"run": run, "other": other, "root": run.parent, "out": tmp_path}
    for line in LINES[command]:
        words = tuple(line.format(**names).split())
        said = run_here(words, surroundings_of(tmp_path), run)
        assert not mark.exists(), line
        assert said.returncode == (2 if command in REFUSES else 0), said.stderr
    assert "CUDA_X" not in os.environ
    assert str(run) not in (*sys.path, os.environ.get("PYTHONPATH"))


def test_a_foreign_record_runs_nothing_on_a_page(foreign: tuple[list[Path], Path]) -> None:
    (run, _), mark = foreign
    analyses = Analyses(
        diff=lambda folders: windlass.diff(*folders, root=run.parent),
        judge=lambda folder: windlass.judge(folder, root=run.parent),
    )
    access = Access(token="t")  # noqa: S106
    with (
        Catalog.open(run.parent) as catalog,
        RecordServer(run.parent, catalog, access, analyses) as server,
        closing(listen("127.0.0.1", 0)) as listening,
    ):
        catalog.refresh()
        serving = serve_app(server.app, listening, access)
        thread = threading.Thread(target=serving.run, args=([listening],), daemon=True)
        thread.start()
        port = listening.getsockname()[1]
        try:
            ids = [windlass.load(folder).id for folder in foreign[0]]
            parts = ("", "/events", "/inputs", "/timeline", "/verdict")
            paths = [f"/api/runs/{ids[0]}{part}" for part in parts]
            for path in ("/api/runs", *paths, f"/api/diff?ids={','.join(ids)}"):
                with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as client:
                    client.request("GET", path, headers={"Authorization": "Bearer t"})
                    assert client.getresponse().status in (200, 404)
        finally:
            serving.should_exit = True
            thread.join()
    assert not mark.exists()


def test_bisect_asks_before_it_runs_what_others_wrote(
    made: tuple[Path, Path], foreign: tuple[list[Path], Path], tmp_path: Path
) -> None:
    (run, other), mark = foreign
    said = run_here(("bisect", str(run), str(other)), surroundings_of(tmp_path), tmp_path)
    assert said.returncode == 2
    assert "not made by you on this machine" in said.stderr
    assert "--run-recorded-code" in said.stderr
    lines = recorded_code(run, other)
    assert any(line.startswith("+os.mkdir") for line in lines)
    assert "variable CUDA_X=1" in lines
    assert not any("PYTHONPATH" in line for line in lines)
    assert not mark.exists()
    # The host that made the runs knows them, until somebody changes one.
    runs = sorted(folder for folder in made[0].iterdir() if (folder / "id").exists())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(made[1]))
        assert recorded_code(*runs) == ()
        assert recorded_code(run)


@pytest.mark.slow
def test_bisect_runs_what_others_wrote_after_showing_it(
    foreign: tuple[list[Path], Path], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (run, other), mark = foreign
    words = ("bisect", str(run), str(other), "--run-recorded-code", "--most-tests", "1")
    cache = {"XDG_CACHE_HOME": str(made_cache(tmp_path_factory))}
    said = run_here((*words, "--runs", str(tmp_path)), surroundings_of(tmp_path) | cache, tmp_path)
    assert "+os.mkdir" in said.stderr
    assert "variable CUDA_X=1" in said.stderr
    assert mark.exists()
    mark.rmdir()


def test_a_command_that_is_given_the_request_runs_its_model(
    foreign: tuple[list[Path], Path], tmp_path: Path
) -> None:
    """What the other tests wait for in vain does happen where it is asked for."""
    (run, _), mark = foreign
    words = ("plan", "--file", str(run / "request.toml"))
    run_here(words, surroundings_of(tmp_path), tmp_path)
    assert mark.exists()
    mark.rmdir()
