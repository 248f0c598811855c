"""The command line with a cache of its own, which already holds this machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli.rank_processes import STAGES, ended
from command_line import Windlass, start
from factories import tiny_machine
from windlass.hardware.local_machine import save_local_machine, system_fingerprint


@pytest.fixture(scope="session")
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment variables that point to a cache with a machine named `here`."""
    cache = tmp_path_factory.mktemp("cache")
    machine = tiny_machine(memory="8 GiB", host="8 GiB")
    device_memory, host = machine.device.tiers
    tiers = (device_memory, host.model_copy(update={"name": "disk"}))
    device = machine.device.model_copy(update={"tiers": tiers})
    machine = machine.model_copy(
        update={"name": "here", "system": system_fingerprint(), "device": device}
    )
    save_local_machine(cache / "windlass", machine)
    return {**os.environ, "XDG_CACHE_HOME": str(cache), "COLUMNS": "200"}


@pytest.fixture
def windlass(surroundings: dict[str, str], tmp_path: Path) -> Windlass:
    """Runs a command line in an empty folder, and waits for its end."""

    def run(*words: str, **more: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            (sys.executable, "-m", "windlass", *words),
            cwd=tmp_path, env=surroundings, capture_output=True, text=True, check=False,
            timeout=120, **more,
        )  # type: ignore[call-overload,no-any-return]  # fmt: skip

    return run


@pytest.fixture(scope="session")
def whole(surroundings: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two pipeline stages that nothing has disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    process = start(surroundings, folder, "train", *STAGES, "--folder", "run")
    assert process.wait(timeout=120) == 0, ended(process)
    ended(process)
    return folder / "run"
