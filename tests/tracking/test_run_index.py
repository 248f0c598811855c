"""Runs are found by whatever a person would type."""

from pathlib import Path

import pytest

from windlass.errors import RecordError
from windlass.tracking.run_folder import RunFolder, create_run_folder
from windlass.tracking.run_reader import find_run


def make(root: Path, name: str = "gpt-tiny") -> RunFolder:
    return create_run_folder(root, name, documents={}, meta={"model": name})


def test_a_run_is_found_by_path_name_id_their_beginnings_and_last(tmp_path: Path):
    first, second = make(tmp_path), make(tmp_path, "gpt2-124m")
    for run in (first, second):
        run.end("finished")
        for text in (str(run.path), run.path.name, run.id, run.id[-6:], run.path.name[:-1]):
            assert find_run(tmp_path, text) == run.path
    assert find_run(tmp_path, "last") == find_run(tmp_path, "last~0") == second.path
    assert find_run(tmp_path, "last~1") == first.path
    with pytest.raises(RecordError, match=r"`last~2` of 2 runs in .*; the first one is `last~1`"):
        find_run(tmp_path, "last~2")


def test_a_query_that_matches_several_runs_names_them(tmp_path: Path):
    first, second = make(tmp_path), make(tmp_path)
    first.close()
    second.close()
    with pytest.raises(RecordError, match=r"means 2 runs: .*write more of the name"):
        find_run(tmp_path, first.path.name[:12])


def test_a_misspelt_name_is_answered_with_the_nearest_name(tmp_path: Path):
    run = make(tmp_path)
    run.close()
    wrong = run.path.name.replace("tiny", "tinny")
    with pytest.raises(RecordError, match=rf"no run `{wrong}`.*did you mean `{run.path.name}`"):
        find_run(tmp_path, wrong)


def test_a_run_folder_elsewhere_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    create_run_folder(
        tmp_path, "gpt", documents={}, meta={}, folder=tmp_path / "here" / "mine"
    ).close()
    monkeypatch.chdir(tmp_path / "here")
    assert find_run(tmp_path / "runs", "mine") == Path("mine")


def test_an_empty_root_says_how_to_start_a_run(tmp_path: Path):
    with pytest.raises(RecordError, match=r"no run in .*start one with `windlass train`"):
        find_run(tmp_path, "last")
    with pytest.raises(RecordError, match="holds no run"):
        find_run(tmp_path, str(tmp_path / "nothing"))
