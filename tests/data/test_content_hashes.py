import json
from pathlib import Path

import pytest

from windlass.atomic_files import hash_file
from windlass.data.content_hashes import hash_files
from windlass.data.readers import SourceFile
from windlass.data.sources import find_corpus
from windlass.errors import DataError


def silent(*news: object) -> None:
    """Progress that nobody asked for."""


def test_hashes_match_the_files(tmp_path: Path):
    files = find_corpus("stdlib").files[:5]
    found = hash_files(files, tmp_path, silent)
    assert [item.sha256 for item in found] == [hash_file(file.path) for file in files]
    assert [item.nbytes for item in found] == [file.path.stat().st_size for file in files]


def test_a_file_unchanged_on_disk_is_not_read_again(tmp_path: Path):
    files = find_corpus("stdlib").files[:5]
    first = hash_files(files, tmp_path, silent)
    (memory,) = tmp_path.glob("hashes-*.json")
    # Given a mark in the memory that reading the file could not give.
    rows = json.loads(memory.read_text(encoding="utf-8"))
    rows[str(files[2].path)][-1] = "marked"
    memory.write_text(json.dumps(rows), encoding="utf-8")
    assert hash_files(files, tmp_path, silent)[2].sha256 == "marked"
    # When the state kept of it is another, then it is read.
    rows[str(files[2].path)][1] += 1
    memory.write_text(json.dumps(rows), encoding="utf-8")
    assert hash_files(files, tmp_path, silent) == first


@pytest.mark.parametrize("damage", ["{", "[]", '{"a": 1}', '{"a": [1, 2]}'])
def test_a_damaged_cache_is_ignored(tmp_path: Path, damage: str):
    files = find_corpus("stdlib").files[:2]
    first = hash_files(files, tmp_path, silent)
    (memory,) = tmp_path.glob("hashes-*.json")
    memory.write_text(damage, encoding="utf-8")
    assert hash_files(files, tmp_path, silent) == first


def test_the_hash_of_a_new_file_is_not_cached(tmp_path: Path):
    path = tmp_path / "new.txt"
    path.write_text("one", encoding="utf-8")
    files = [SourceFile(name="new.txt", path=path, single_document=True)]
    hash_files(files, tmp_path, silent)
    assert not list(tmp_path.glob("hashes-*.json"))


def test_a_file_that_disappeared_is_reported(tmp_path: Path):
    files = [SourceFile(name="gone.txt", path=tmp_path / "gone.txt", single_document=True)]
    with pytest.raises(DataError, match=r"gone\.txt` cannot be read: No such file"):
        hash_files(files, tmp_path, silent)
