"""A run folder is locked by one process, and its name ends with its id."""

import re
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from windlass.errors import RecordError
from windlass.schema.request import Request
from windlass.schema.run_record import REQUEST_FILE
from windlass.tracking.folder_lock import is_locked
from windlass.tracking.journal_reader import read_journal
from windlass.tracking.run_folder import (
    LOCK_FILE,
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
