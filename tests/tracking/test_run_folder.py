"""A run folder is locked by one process, and its name ends with its id."""

import re
import subprocess
import sys
import time
import uuid
from functools import partial
from pathlib import Path

import pytest

from windlass.atomic_files import atomic_writer
from windlass.errors import RecordError
from windlass.schema.request import Request
from windlass.schema.run_record import REQUEST_FILE
from windlass.tracking.folder_lock import LOCK_FILE, is_locked
from windlass.tracking.journal_reader import read_journal
from windlass.tracking.run_folder import (
    RunFolder,
    create_run_folder,
    journal_path,
    read_run_id,
    reopen_run_folder,
    uuid7,
)

HOLD = """
import sys, time
from pathlib import Path
from windlass.tracking.run_folder import reopen_run_folder

run = reopen_run_folder(Path(sys.argv[1]), meta={})
sys.stdout.write("held\\n")
sys.stdout.flush()
time.sleep(600)
"""


def make(root: Path, name: str = "gpt-tiny") -> RunFolder:
    return create_run_folder(root, name, documents={REQUEST_FILE: Request()}, meta={"model": name})


def test_a_new_folder_holds_its_documents_id_and_opening_event(tmp_path: Path):
    with make(tmp_path) as run:
        assert re.fullmatch(r"\d{4}-\d\d-\d\d-gpt-tiny-[0-9a-f]{6}", run.path.name)
        assert run.path.name.endswith(run.id[-6:])
        assert read_run_id(run.path) == run.id
        assert Request.load(run.path / REQUEST_FILE) == Request()
        journal = read_journal(journal_path(run.path, 0, 1))
        assert journal.meta == {"id": run.id, "attempt": 1, "model": "gpt-tiny"}


def test_a_model_named_by_a_file_gives_a_plain_folder_name(tmp_path: Path):
    with make(tmp_path, "../my models/é.py:build") as run:
        assert run.path.parent == tmp_path
        assert re.fullmatch(r"[0-9-]+-my-models-.py-build-[0-9a-f]{6}", run.path.name)


def test_a_second_process_is_refused_with_the_pid_of_the_holder(tmp_path: Path):
    with make(tmp_path) as run:
        folder = run.path
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(RecordError, match=rf"is taken by process {process.pid} on \S+; wait"):
            reopen_run_folder(folder, meta={})
        process.kill()
        process.wait()
        # A killed holder releases the folder at once, and its journal counts as an attempt.
        assert not is_locked(folder / LOCK_FILE)
        with reopen_run_folder(folder, meta={}) as run:
            assert run.attempt == 3


def test_a_second_holder_in_the_same_process_is_refused_too(tmp_path: Path):
    with make(tmp_path) as run, pytest.raises(RecordError, match="is taken by process"):
        reopen_run_folder(run.path, meta={})


def test_a_refused_second_holder_leaves_no_attempt_behind(tmp_path: Path):
    with make(tmp_path) as run:
        with pytest.raises(RecordError):
            reopen_run_folder(run.path, meta={})
        assert [file.name for file in (run.path / "journal").iterdir()] == ["0.1.j"]


def test_asking_whether_a_folder_is_locked_never_refuses_its_holder(tmp_path: Path):
    with make(tmp_path) as run:
        folder = run.path
    ask = (
        "import sys\nfrom pathlib import Path\n"
        "from windlass.tracking.folder_lock import is_locked\n"
        "sys.stdout.write('go\\n')\nsys.stdout.flush()\n"
        "while True:\n    is_locked(Path(sys.argv[1]))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", ask, str(folder / LOCK_FILE)], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        for _ in range(20):
            reopen_run_folder(folder, meta={}).close()
        process.kill()


def test_a_folder_given_by_name_is_not_overwritten(tmp_path: Path):
    folder = tmp_path / "mine"
    create_run_folder(tmp_path, "gpt", documents={}, meta={}, folder=folder).close()
    with pytest.raises(RecordError, match=r"`.*mine` already holds a run; resume it"):
        create_run_folder(tmp_path, "gpt", documents={}, meta={}, folder=folder)
    reopen_run_folder(folder, meta={}).close()


@pytest.mark.parametrize("name", [".lock", "checkpoints", "id", "tasks/own.toml", "ranks"])
@pytest.mark.parametrize("is_new", [False, True])
def test_a_run_folder_that_holds_a_link_is_refused_and_nothing_is_written_through_it(
    tmp_path: Path, name: str, is_new: bool
):
    if is_new:
        folder = tmp_path / "run"
        folder.mkdir()
    else:
        with make(tmp_path) as run:
            folder = run.path
    victim = tmp_path / "victim"
    victim.write_text(f"{uuid7()}\nformat 2\n")
    before = victim.read_text()
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(victim)
    new = partial(create_run_folder, tmp_path, "gpt", documents={}, folder=folder)
    again = partial(reopen_run_folder, folder)
    with pytest.raises(RecordError):
        (new if is_new else again)(meta={})
    assert victim.read_text() == before
    assert (folder / name).is_symlink()


def test_a_lock_file_that_is_another_file_by_a_second_name_is_not_overwritten(tmp_path: Path):
    with make(tmp_path) as run:
        folder = run.path
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (folder / LOCK_FILE).unlink()
    (folder / LOCK_FILE).hardlink_to(victim)
    with pytest.raises(RecordError, match="is no file of this folder alone"):
        reopen_run_folder(folder, meta={})
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("name", [".plan.toml.0a1b2c3d.tmp", ".id.0a1b2c3d.tmp"])
def test_a_temporary_file_of_a_killed_start_blocks_nothing_and_is_removed(
    tmp_path: Path, name: str
):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / name).write_text("half")
    create_run_folder(tmp_path, "gpt", documents={}, meta={}, folder=folder).close()
    assert not (folder / name).exists()
    (folder / name).write_text("half")
    reopen_run_folder(folder, meta={}).close()
    assert not (folder / name).exists()


def test_a_temporary_file_that_a_process_is_writing_stays(tmp_path: Path):
    with make(tmp_path) as run:
        folder = run.path
    with atomic_writer(folder / "report.html") as report:
        reopen_run_folder(folder, meta={}).close()
        report.write(b"whole")
    assert (folder / "report.html").read_bytes() == b"whole"


def test_a_start_that_was_killed_before_the_folder_was_a_run_is_started_over(tmp_path: Path):
    folder = tmp_path / "run"

    def die(run: RunFolder) -> None:
        (run.path / "checkpoints" / "step-00000000").mkdir(parents=True)
        (run.path / "tokenizer.json").write_text("of another request")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        create_run_folder(
            tmp_path, "a", documents={REQUEST_FILE: Request()}, meta={}, folder=folder, fill=die
        )
    with pytest.raises(RecordError, match="holds no run"):
        read_run_id(folder)

    with create_run_folder(tmp_path, "b", documents={}, meta={}, folder=folder) as run:
        assert run.attempt == 1
    assert {path.name for path in folder.iterdir()} == {".lock", "id", "journal"}


def test_a_file_that_a_user_has_put_beside_a_killed_start_is_not_removed(tmp_path: Path):
    folder = tmp_path / "run"

    def die(run: RunFolder) -> None:
        (run.path / "notes.txt").write_text("mine")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        create_run_folder(tmp_path, "a", documents={}, meta={}, folder=folder, fill=die)
    with pytest.raises(RecordError, match=r"it holds `notes.txt`"):
        create_run_folder(tmp_path, "b", documents={}, meta={}, folder=folder)
    assert (folder / "notes.txt").read_text() == "mine"


def test_checkpoints_beside_an_id_that_was_removed_are_not_taken_for_a_killed_start(
    tmp_path: Path,
):
    with make(tmp_path) as run:
        folder = run.path
    (folder / "checkpoints").mkdir()
    (folder / "id").unlink()
    with pytest.raises(RecordError, match=r"it holds `checkpoints`"):
        create_run_folder(tmp_path, "b", documents={}, meta={}, folder=folder)
    assert (folder / "checkpoints").is_dir()


def test_a_folder_without_a_run_is_reported(tmp_path: Path):
    with pytest.raises(RecordError, match=r"holds no run: it has no file `id`"):
        reopen_run_folder(tmp_path, meta={})


def test_ids_are_version_7_uuids_in_the_order_of_creation():
    ids = []
    for _ in range(20):
        ids.append(uuid7())
        time.sleep(0.0015)
    assert ids == sorted(ids)
    assert len({uuid7() for _ in range(2000)}) == 2000
    for text in ids:
        value = uuid.UUID(text)
        assert (value.version, value.variant) == (7, uuid.RFC_4122)
        assert abs((value.int >> 80) / 1000 - time.time()) < 60
