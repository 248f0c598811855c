"""Factories of small true corpora."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from windlass.data.token_files import TokenDataset

sys.path.insert(0, str(Path(__file__).parent))

from made_text import prepare, words


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """Makes a folder of text files, `a/00.txt` and on."""

    def make(documents: int = 40, count: int = 80) -> Path:
        root = tmp_path / "corpus"
        for index in range(documents):
            path = root / "ab"[index % 2] / f"{index:02}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(words(count, index), encoding="utf-8")
        return root

    return make


@pytest.fixture
def tokens(folder: Callable[..., Path], tmp_path: Path) -> Callable[..., TokenDataset]:
    """Prepares such a folder."""

    def make(tokenizer: str = "byte", documents: int = 40, count: int = 80) -> TokenDataset:
        return prepare(
            str(folder(documents, count)),
            tokenizer=tokenizer,
            vocabulary=400,
            held_out=0.2,
            cache=tmp_path / "cache",
        )

    return make
