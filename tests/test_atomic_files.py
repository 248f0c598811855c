"""Atomic files: written completely or not at all."""

import errno
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from windlass.atomic_files import (
    atomic_path,
    atomic_write,
    atomic_writer,
    hash_file,
    link_or_copy,
    one_process,
    require_writable,
    scratch_folder,
)
from windlass.errors import StorageError

_WRITES_FOR_EVER = """
import sys
import tempfile
from pathlib import Path
from windlass.atomic_files import atomic_write
for letter in "ab" * 10**6:
    atomic_write(Path(sys.argv[1]), letter * 2_000_000)
    print(letter, flush=True)
"""
_WRITES_ON_A_FULL_DISK = """
import resource, sys
from pathlib import Path
from windlass.errors import StorageError
from windlass.atomic_files import atomic_write
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    atomic_write(Path(sys.argv[1]), b"x" * 5000)
except StorageError as error:
    print(error)
"""


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_a_written_file_is_complete_and_leaves_no_other(tmp_path: Path):
    path = tmp_path / "deep" / "down" / "file"
    atomic_write(path, "first")
    atomic_write(path, b"second")
    assert path.read_bytes() == b"second"
    assert names(path.parent) == ["file"]


def test_a_file_is_written_though_its_folder_is_renamed_as_soon_as_it_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (begun := tmp_path / "begun").mkdir()
    replace = Path.replace

    def replace_then_rename(self: Path, target: Path) -> Path:
        found = replace(self, target)
        if begun.exists():
            replace(begun, tmp_path / "done")
        return found

    monkeypatch.setattr(Path, "replace", replace_then_rename)
    atomic_write(begun / "file", "text")

    assert (tmp_path / "done" / "file").read_text() == "text"


def test_a_block_that_fails_leaves_the_old_file(tmp_path: Path):
    path = tmp_path / "file"
    atomic_write(path, "old")
    with pytest.raises(TypeError), atomic_writer(path) as file:
        file.writelines([b"half", None])  # type: ignore[list-item]  # the fault
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_a_killed_writer_leaves_the_old_file_or_the_new_one(tmp_path: Path):
    path = tmp_path / "file"
    for _ in range(4):
        writer = subprocess.Popen(
            [sys.executable, "-c", _WRITES_FOR_EVER, str(path)], stdout=subprocess.PIPE
        )
        assert writer.stdout is not None
        with writer.stdout:
            writer.stdout.readline()
            writer.send_signal(signal.SIGKILL)
            writer.wait()
        content = path.read_text()
        assert len(content) == 2_000_000
        assert len(set(content)) == 1


def test_a_full_disk_is_reported_and_leaves_the_old_file(tmp_path: Path):
    path = tmp_path / "file"
    atomic_write(path, "old")
    done = subprocess.run(
        [sys.executable, "-c", _WRITES_ON_A_FULL_DISK, str(path)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.startswith(f"no space left to write `{path}`")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("place", ["file/below", "folder", "n" * 250])
def test_an_unwritable_path_is_named(tmp_path: Path, place: str):
    (tmp_path / "file").write_text("old")
    (tmp_path / "folder").mkdir()
    with pytest.raises(StorageError, match=f"{place}` cannot be written"):
        atomic_write(tmp_path / place, "new")
    assert names(tmp_path) == ["file", "folder"]


def test_a_pipe_is_refused_and_stays_a_pipe(tmp_path: Path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(StorageError, match="pipe` cannot be written: is not a regular file"):
        atomic_write(pipe, "new")
    assert pipe.is_fifo()


@pytest.mark.parametrize("place", ["file/below/deeper", "folder"])
def test_an_unwritable_path_is_refused_before_anything_is_written(tmp_path: Path, place: str):
    (tmp_path / "file").write_text("old")
    (tmp_path / "folder").mkdir()
    with pytest.raises(StorageError, match=f"{place}` cannot be written"):
        require_writable(tmp_path / place)
    require_writable(tmp_path / "new" / "file")
    assert names(tmp_path) == ["file", "folder"]


@pytest.mark.parametrize("place", ["/proc/file", "/proc/new/file"])
def test_a_folder_that_is_not_on_a_disk_is_refused(place: str):
    with pytest.raises(StorageError, match=f"`{place}` cannot be written"):
        atomic_write(Path(place), "new")


def test_a_hash_is_that_of_sha256sum(tmp_path: Path):
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    told = subprocess.run(["sha256sum", str(path)], capture_output=True, text=True, check=True)
    assert hash_file(path) == told.stdout.split()[0]


def test_what_a_killed_process_has_left_of_a_file_or_folder_is_removed_and_no_other(
    tmp_path: Path,
):
    run = tmp_path / "run"
    program = (
        "import sys; from pathlib import Path; from windlass.atomic_files import *\n"
        "run = Path(sys.argv[1])\n"
        "with scratch_folder(run) as folder, atomic_path(run / 'file', clears=True) as file:\n"
        "    (folder / 'large').write_text('x'); file.write_text('x'); print(folder, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    run.mkdir()
    command = (sys.executable, "-c", program, str(run))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with (
        subprocess.Popen(command, text=True, **pipes) as killed,
        subprocess.Popen(command, text=True, **pipes) as living,
    ):
        folders = [Path(each.stdout.readline().strip()) for each in (killed, living)]
        killed.kill()
        killed.wait()
        with scratch_folder(run), atomic_path(run / "file", clears=True) as file:
            file.write_text("new")
        assert [folder.exists() for folder in folders] == [False, True]
        assert len(list(run.glob(".file.*.tmp"))) == 1
        living.communicate("")
    assert names(run) == ["file"]


@pytest.mark.skipif(sys.platform != "linux", reason="needs a folder that nobody may write to")
def test_a_scratch_folder_is_elsewhere_where_a_folder_cannot_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "run").mkdir()
    for beside, parent in ((tmp_path / "run", tmp_path / "run"), (Path("/sys"), tmp_path)):
        with scratch_folder(beside) as folder:
            assert folder.parent == parent
        assert not folder.exists()


def test_a_file_gets_a_second_name_or_where_links_cannot_be_made_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "file"
    file.write_bytes(b"weights")
    assert link_or_copy(file, tmp_path / "linked")
    assert file.samefile(tmp_path / "linked")

    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "this file system has no links")

    monkeypatch.setattr(os, "link", refuse)
    assert not link_or_copy(file, tmp_path / "copied")
    assert not file.samefile(tmp_path / "copied")
    assert (tmp_path / "copied").read_bytes() == b"weights"


def test_one_process_at_a_time_is_in_a_block_and_the_next_says_that_it_waits(tmp_path: Path):
    lock, waits, order = tmp_path / "new" / "lock", threading.Event(), []

    def second() -> None:
        with one_process(lock, waits.set):
            order.append("second")

    with one_process(lock, lambda: order.append("waited in vain")):
        thread = threading.Thread(target=second)
        thread.start()
        assert waits.wait(10)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
