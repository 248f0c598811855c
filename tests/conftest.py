"""What all tests share: `factories.py` makes tiny graphs, machines and plans."""

import getpass
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Tests are imported each on its own (importmode=importlib), so a module that they share must be
# found by name.
sys.path.insert(0, str(Path(__file__).parent))

# Tests with an empty cache of their own share what torch has compiled, in torch's own place.
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR",
    str(Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"),
)

# A busy machine is no fault of the code.
settings.register_profile("windlass", deadline=None)
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
    "launches": ("runtime/test_launches.py",),
    "transformers": (
        "api/training/test_export.py",
        "models/huggingface/test_pretrained_weights.py",
    ),
}
"""Tests that one worker takes: those that start several ranks, some of which must act within
seconds and would starve each other, those that share captured graphs or counted launches, and those
that import `transformers`, which takes seconds."""


# Before xdist reads the groups.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives all tests of a group to one worker."""
    root = Path(__file__).parent
    for item in items:
        path = item.path.relative_to(root).as_posix()
        for group, prefixes in _GROUPS.items():
            if path.startswith(prefixes):
                item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session", autouse=True)
def _users_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or changes the user's own folders, and none measures this machine for minutes.

    The cache holds a machine named `here`, with a disk.
    """
    from made_cache import made_cache

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(made_cache(tmp_path_factory, "cache", disk="8 GiB")))
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        yield
