"""Tags, notes and marks are files of their own, so that copies of a run can be joined."""

import shutil
from pathlib import Path

import pytest

from windlass.errors import InputErrors, RecordError
from windlass.record.annotations import ANNOTATIONS_FOLDER, annotate, read_annotations


def test_changes_count_in_their_order(tmp_path: Path):
    annotate(tmp_path, tags=["b", "a"], note="first", broken=True)
    annotate(tmp_path, tags=["c"], remove=["b"], archived=True)
    last = annotate(tmp_path, note="second", broken=False)
    assert (last.tags, last.notes) == (("a", "c"), ("first", "second"))
    assert (last.archived, last.broken, last.faults) == (True, False, ())
    assert len(list((tmp_path / ANNOTATIONS_FOLDER).iterdir())) == 3


def test_the_union_of_the_files_of_two_copies_has_the_changes_of_both(tmp_path: Path):
    one, other = tmp_path / "one", tmp_path / "other"
    annotate(one, tags=["both"])
    shutil.copytree(one, other)
    annotate(one, note="here")
    annotate(other, note="there", remove=["both"])
    for source, target in ((one, other), (other, one)):
        shutil.copytree(source, target, dirs_exist_ok=True)
    assert read_annotations(one) == read_annotations(other)
    assert set(read_annotations(one).notes) == {"here", "there"}
    assert read_annotations(one).tags == ()


@pytest.mark.parametrize("tag", ["", "  ", "x" * 201, "a\0b", "\ud800"])
def test_a_tag_is_a_word_of_bounded_length(tmp_path: Path, tag: str):
    with pytest.raises(InputErrors, match="the tag"):
        annotate(tmp_path, tags=["good", tag])
    assert not (tmp_path / ANNOTATIONS_FOLDER).exists()


def test_an_empty_change_is_refused(tmp_path: Path):
    with pytest.raises(RecordError, match="nothing to note"):
        annotate(tmp_path)


DAMAGED = {
    "empty": b"", "list": b"[]", "binary": b"\xff", "deep": b"[" * 100_000,
    "large": b"{" + b" " * 2**20,
}  # fmt: skip


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_change_is_a_fault_and_the_others_count(tmp_path: Path, content: bytes):
    annotate(tmp_path, tags=["kept"])
    (tmp_path / ANNOTATIONS_FOLDER / "00.json").write_bytes(content)
    read = read_annotations(tmp_path)
    assert read.tags == ("kept",)
    assert read.faults[0].startswith(f"{ANNOTATIONS_FOLDER}/00.json: ")


def test_values_of_the_wrong_kind_count_as_no_change(tmp_path: Path):
    (tmp_path / ANNOTATIONS_FOLDER).mkdir()
    (tmp_path / ANNOTATIONS_FOLDER / "00.json").write_text(
        '{"tags": [1, "\\ud800", "good"], "remove": "x", "note": 3, "archived": "yes"}'
    )
    read = read_annotations(tmp_path)
    assert (read.tags, read.notes, read.archived) == (("good",), (), False)
