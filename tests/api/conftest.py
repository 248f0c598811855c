"""A cache with a machine, and a folder with a small text, for tests that train."""

import os
from pathlib import Path
from tempfile import mkdtemp

import pytest

from made_cache import made_cache

# Libraries of Hugging Face read where their cache is, and that there is no hub, when they load.
os.environ.setdefault("HF_HOME", mkdtemp(prefix="hf"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with a machine named `here`; it keeps what tests capture."""
    return made_cache(tmp_path_factory)


@pytest.fixture
def home(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a small text; the environment points to that cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    text = "\n".join(f"{number} times {number} is {number * number}" for number in range(400))
    for part in ("one", "two", "three"):
        (tmp_path / "text" / part).mkdir(parents=True)
        (tmp_path / "text" / part / "table.txt").write_text(f"{part}\n{text}")
    return tmp_path
