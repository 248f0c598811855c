"""A command line with a cache of its own, on a machine that is known already."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli.pods import STAGES, ended
from command_line import Windlass, start
from factories import tiny_machine
from windlass.hardware.local_machine import save_local_machine, system_fingerprint


@pytest.fixture(scope="session")
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment variables that lead to a cache which holds a machine named `here`."""
    cache = tmp_path_factory.mktemp("cache")
    machine = tiny_machine(memory="8 GiB", host="8 GiB")
    near, far = machine.device.tiers
    tiers = (near, far.model_copy(update={"name": "disk"}))
    device = machine.device.model_copy(update={"tiers": tiers})
    machine = machine.model_copy(
        update={"name": "here", "system": system_fingerprint(), "device": device}
    )
    save_local_machine(cache / "windlass", machine)
    return {**os.environ, "XDG_CACHE_HOME": str(cache), "COLUMNS": "200"}


@pytest.fixture
def windlass(surroundings: dict[str, str], tmp_path: Path) -> Windlass:
    """Runs one command line in an empty folder, to its end."""

    def run(*words: str, **more: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            (sys.executable, "-m", "windlass", *words),
            cwd=tmp_path, env=surroundings, capture_output=True, text=True, check=False,
            timeout=120, **more,
        )  # type: ignore[call-overload,no-any-return]  # fmt: skip

    return run


@pytest.fixture(scope="session")
def whole(surroundings: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two stages that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    process = start(surroundings, folder, "train", *STAGES, "--folder", "run")
    assert process.wait(timeout=120) == 0, ended(process)
    ended(process)
    return folder / "run"
