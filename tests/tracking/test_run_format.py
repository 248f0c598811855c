"""A run folder of another format is refused with its format and the way out, and never hidden."""

from pathlib import Path

import pytest

from windlass.errors import RecordError
from windlass.tracking.run_folder import (
    ID_FILE,
    RUN_FORMAT,
    RunFolder,
    create_run_folder,
    read_run_format,
    reopen_run_folder,
)
from windlass.tracking.run_reader import describe_other_formats, find_run, load_run

OLDER = (
    rf"`.*{{name}}` was written by an older Windlass \(format 1, this one reads {RUN_FORMAT}\); "
    "start it anew, or read it with the version that wrote it"
)


def make(root: Path, name: str = "gpt-tiny") -> RunFolder:
    return create_run_folder(root, name, documents={}, meta={"model": name})


def make_old(root: Path, name: str = "gpt-old") -> Path:
    """A folder as the first version left it: its id file holds the id alone."""
    with make(root, name) as run:
        (run.path / ID_FILE).write_text(run.id + "\n")
    return run.path


def test_a_new_run_folder_states_its_format(tmp_path: Path):
    with make(tmp_path) as run:
        assert read_run_format(run.path) == RUN_FORMAT
        assert (run.path / ID_FILE).read_text() == f"{run.id}\nformat {RUN_FORMAT}\n"


@pytest.mark.parametrize("read", [load_run, lambda folder: reopen_run_folder(folder, meta={})])
def test_an_older_run_folder_is_refused_in_one_sentence(tmp_path: Path, read: object):
    folder = make_old(tmp_path)
    journals = sorted((folder / "journal").iterdir())
    with pytest.raises(RecordError, match=OLDER.format(name=folder.name)) as caught:
        read(folder)  # type: ignore[operator]
    assert "\n" not in str(caught.value)
    assert sorted((folder / "journal").iterdir()) == journals, "nothing was added to it"


def test_a_newer_run_folder_asks_for_an_update(tmp_path: Path):
    with make(tmp_path) as run:
        (run.path / ID_FILE).write_text(f"{run.id}\nformat 99\n")
    with pytest.raises(RecordError, match=r"by a newer Windlass \(format 99, .*update Windlass"):
        load_run(run.path)


def test_training_into_an_older_run_folder_is_refused(tmp_path: Path):
    folder = make_old(tmp_path)
    with pytest.raises(RecordError, match=OLDER.format(name=folder.name)):
        create_run_folder(tmp_path, "gpt", documents={}, meta={}, folder=folder)


def test_one_sentence_names_the_runs_of_another_format(tmp_path: Path):
    make(tmp_path).close()
    assert describe_other_formats(tmp_path) is None
    folders = [make_old(tmp_path), make_old(tmp_path, "gpt-older")]
    sentence = describe_other_formats(tmp_path)
    assert sentence is not None
    assert sentence.startswith("another version of Windlass wrote 2 runs in ")
    assert all(f"`{folder.name}`" in sentence for folder in folders)
    assert "\n" not in sentence


def test_an_older_run_is_found_by_its_name_only_to_be_refused(tmp_path: Path):
    folder = make_old(tmp_path)
    make(tmp_path).close()
    for query in (folder.name, folder.name[:-2], folder.name[-6:], str(folder)):
        with pytest.raises(RecordError, match=OLDER.format(name=folder.name)):
            find_run(tmp_path, query)


def test_last_is_the_newest_run_that_can_be_read(tmp_path: Path):
    with make(tmp_path) as run:
        newest = run.path
    make_old(tmp_path)
    assert find_run(tmp_path, "last") == newest


def test_where_all_runs_are_older_the_message_says_so(tmp_path: Path):
    folder = make_old(tmp_path)
    with pytest.raises(RecordError, match=rf"no run in .*1 run .*`{folder.name}`.*windlass train"):
        find_run(tmp_path, "last")
