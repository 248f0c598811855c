"""The command line with a cache of its own, which already holds this machine."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from cli.forked_command_line import run_forked
from cli.rank_processes import CONSTANT, STAGES, ended
from command_line import Windlass, run_here, start
from forked_runs import forking_process
from made_cache import made_cache


@pytest.fixture(scope="session")
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment variables that point to a cache with a machine named `here`, and to Python."""
    cache = made_cache(tmp_path_factory)
    folders = {"XDG_CACHE_HOME": str(cache), "XDG_DATA_HOME": str(tmp_path_factory.mktemp("data"))}
    return {**os.environ, **folders, "COLUMNS": "200", "PYTHON": sys.executable}


_WITHOUT_RANKS = frozenset(
    {"batch", "data", "fit", "keys", "launch", "machines", "models", "plan", "runs", "show"}
    | {"dataflow", "smallest-machine", "validate", "import-runs", "mirror"}
)
"""Commands that neither train nor measure: they may run within the process of the tests."""


@pytest.fixture(scope="session")
def _forking(surroundings: dict[str, str]) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Gives a process that forks one for each command line that trains.

    The next command line gets a new one if a command line that took too long has ended it.
    """
    script = Path(__file__).with_name("forked_command_line.py")
    processes: list[subprocess.Popen[str]] = []

    with ExitStack() as started:

        def living() -> subprocess.Popen[str]:
            if not processes or processes[-1].poll() is not None:
                processes.append(started.enter_context(forking_process(script, surroundings)))
            return processes[-1]

        yield living


@pytest.fixture
def windlass(
    surroundings: dict[str, str], tmp_path: Path, request: pytest.FixtureRequest
) -> Windlass:
    """Runs a command line in an empty folder, and waits for its end.

    Commands that train run in a process of their own, as they would for a user. It is forked from
    one in which all is imported, unless it gets variables that imports would see too. Other
    commands run in this process.
    """

    def run(
        *words: str, env: Mapping[str, str] | None = None, **limits: int
    ) -> subprocess.CompletedProcess[str]:
        if env:
            return subprocess.run(
                (sys.executable, "-m", "windlass", *words),
                cwd=tmp_path, env=surroundings | dict(env), capture_output=True, text=True,
                check=False, timeout=120,
            )  # fmt: skip
        if words[0] in _WITHOUT_RANKS:
            return run_here(words, surroundings, tmp_path)
        forking = request.getfixturevalue("_forking")()
        return run_forked(forking, words, tmp_path, surroundings, **limits)

    return run


@pytest.fixture
def refused(surroundings: dict[str, str], tmp_path: Path) -> Windlass:
    """Runs any command line in this process: one that ends before it starts to train."""
    return lambda *words: run_here(words, surroundings, tmp_path)


@pytest.fixture(scope="session")
def whole(surroundings: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two pipeline stages that nothing has disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    process = start(surroundings, folder, "train", *STAGES, "--folder", "run")
    assert process.wait(timeout=120) == 0, ended(process)
    ended(process)
    return folder / "run"


@pytest.fixture(scope="session")
def eight_steps(
    surroundings: dict[str, str],
    _forking: Callable[[], subprocess.Popen[str]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Eight steps at a constant learning rate on two pipeline stages of one host."""
    folder = tmp_path_factory.mktemp("eight")
    words = ("train", *CONSTANT, "train.steps=8", "--folder", "run")
    done = run_forked(_forking(), words, folder, surroundings)
    assert done.returncode == 0, done.stderr
    return folder / "run"
