from pathlib import Path

import numpy as np

from windlass.atomic_files import hash_file
from windlass.data.token_files import DocumentIndex, file_meta, open_dataset


def test_a_missing_or_empty_folder_has_no_tokens(tmp_path: Path):
    assert open_dataset(tmp_path / "none") is None
    assert open_dataset(tmp_path) is None


def test_a_changed_byte_anywhere_in_a_large_file_changes_its_hash(tmp_path: Path):
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(80 * 2**20)
    before = file_meta(path)
    with path.open("r+b") as file:
        file.seek(80 * 2**20 * 100 // 157)
        file.write(b"\1")
    assert before.nbytes == file_meta(path).nbytes
    assert before.sha256 != file_meta(path).sha256 == hash_file(path)


def test_documents_between_two_tokens_are_those_that_overlap_them():
    names = b"abbccc"
    documents = DocumentIndex(
        starts=np.array([0, 4, 5, 9]),
        name_starts=np.array([0, 1, 3, 6]),
        names=np.frombuffer(names, dtype=np.uint8),
    )
    assert len(documents) == 3
    assert documents.between(0, 4) == ("a",)
    assert documents.between(3, 5) == ("a", "bb")
    assert documents.between(4, 5) == ("bb",)
    assert documents.between(3, 6) == ("a", "bb", "ccc")
    assert documents.between(8, 9) == ("ccc",)
