"""What all tests share: `factories.py` makes tiny graphs, machines and plans."""

import gc
import getpass
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

# Tests are imported each on its own (importmode=importlib), so a module that they share must be
# found by name.
sys.path.insert(0, str(Path(__file__).parent))

from power_cuts import without_power_cuts

# Tests with an empty cache of their own share what torch has compiled, in torch's own place.
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR",
    str(Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"),
)

# Processes that tests start keep their compiled code, as those of a user do: without it each
# compiles all of Windlass anew, for almost a second.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A busy machine is no fault of the code. Each run draws other cases, so that few suffice in one.
settings.register_profile("windlass", deadline=None, max_examples=40)
settings.register_profile("thorough", deadline=None, max_examples=400)
settings.load_profile("windlass")

_GROUPS = {
    "ranks": (
        "cli/test_faults.py",
        "cli/commands/test_check.py",
        "cli/commands/test_launch.py",
        "gpu/test_doctor.py",
        "runtime/distributed/",
        "runtime/test_tensor_parallel.py",
    ),
    "capture": ("capture/",),
    "planner": ("planner/",),
    "server": ("server/",),
    "transformers": (
        "api/training/test_adapter_files.py",
        "api/training/test_adapters_in.py",
        "api/training/test_export.py",
        "models/huggingface/",
    ),
}
"""Files that one worker takes: those that start several ranks, some of which must act within
seconds and would starve each other, those that share captured graphs, tables of plans or a browser,
and those that import `transformers`, which takes seconds. The largest group begins first, so that
no worker is left alone with much at the end."""


_SELDOM = (10_000, 20, 50)
"""Thresholds of the collector's generations."""


class _TogetherByFile(LoadScopeScheduling):
    """Gives all tests of a group, or of a file, to one worker: they share what it has made."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        below = path.removeprefix(f"{Path(__file__).parent.name}/")
        found = (group for group, prefixes in _GROUPS.items() if below.startswith(prefixes))
        return next(found, path)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> _TogetherByFile:
    return _TogetherByFile(config, log)


def pytest_configure() -> None:
    """Lets the collector rest while tests are collected, which makes no garbage."""
    gc.disable()
    without_power_cuts()


def pytest_collection_finish() -> None:
    """Lets the collector look at no module again: pytest collects five times at the end alone.

    What tests leave behind is looked at seldom too: it took 6 % of the suite's time.
    """
    gc.freeze()
    gc.set_threshold(*_SELDOM)
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _users_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or changes the user's own folders, and none measures this machine for minutes.

    The cache holds a machine named `here`, with a disk.
    """
    from made_cache import made_cache

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(made_cache(tmp_path_factory)))
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        yield
