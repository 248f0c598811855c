"""Building C++ code into the cache: what is kept, and what can go wrong."""

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from windlass.errors import MachineError, StorageError
from windlass.sparsity import native_library
from windlass.sparsity.native_library import build_native_library

SOURCE = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "answer.cpp"
    path.write_text(SOURCE)
    return path


def fake_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Puts a compiler that runs a shell script before, or in place of, all others."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "c++").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "c++").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def answer(library: Path) -> int:
    return int(ctypes.CDLL(str(library)).answer())


def is_alive(pid: int) -> bool:
    """Whether a process runs: one that has ended may wait for a parent to ask how."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_it_is_built_once_and_a_damaged_one_anew(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    try:
        library = build_native_library(source)
    except MachineError:
        pytest.skip("no C++ compiler here")
    good = library.read_bytes()
    fake_compiler(tmp_path, monkeypatch, "echo asked again >&2; exit 1")
    assert build_native_library(source) == library
    assert answer(library) == 42

    library.unlink()  # this process still has the good one mapped
    library.write_bytes(good[: len(good) // 2])
    with pytest.raises(MachineError, match="asked again"):
        build_native_library(source)


def test_without_a_compiler_it_says_which_are_looked_for(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MachineError, match=r"no C\+\+ compiler .*; install one, such as g\+\+"):
        build_native_library(source)


def test_a_compiler_that_fails_is_quoted(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fake_compiler(tmp_path, monkeypatch, "echo note >&2; echo 'fatal error: no header' >&2; exit 1")
    with pytest.raises(MachineError, match=r"`c\+\+` cannot build `answer.cpp`: fatal error: no"):
        build_native_library(source)
    assert not list((tmp_path / "cache" / "windlass").glob("*.so"))


def test_a_compiler_that_hangs_is_ended_with_all_its_processes(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pid = tmp_path / "pid"
    fake_compiler(tmp_path, monkeypatch, f"sleep 60 & echo $! > {pid}; wait")
    said: list[str] = []
    monkeypatch.setattr(native_library, "_QUIET_SECONDS", 0.1)

    with pytest.raises(MachineError, match=r"after 0\.3 s and was ended"):
        build_native_library(
            source, timeout_seconds=0.3, progress=lambda message, *_: said.append(message)
        )

    assert said == ["building answer.cpp with c++"]
    deadline = time.monotonic() + 5
    while is_alive(int(pid.read_text())) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(int(pid.read_text()))


def test_a_cache_that_cannot_be_written_is_named(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(StorageError, match="cannot be written"):
        build_native_library(source)


@pytest.mark.parametrize("fails", [False, True])
def test_of_ranks_that_build_at_once_one_asks_the_compiler(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
):
    calls = tmp_path / "calls"
    fake_compiler(
        tmp_path, monkeypatch,
        f"echo call >> {calls}; sleep 0.5; " + ("exit 1" if fails else "touch \"$3\""),
    )  # fmt: skip
    code = (
        "import sys, pathlib\n"
        "from windlass.errors import MachineError\n"
        "from windlass.sparsity.native_library import build_native_library\n"
        "print('ready', flush=True)\n"
        "input()\n"
        "try: print(build_native_library(pathlib.Path(sys.argv[1])))\n"
        "except MachineError as error: print(error)\n"
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(source)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(3)
    ]  # fmt: skip
    for rank in ranks:
        assert rank.stdout
        assert rank.stdout.readline() == "ready\n"
    for rank in ranks:
        assert rank.stdin
        rank.stdin.write("\n")
        rank.stdin.flush()
    results = {rank.communicate(timeout=60)[0] for rank in ranks}

    assert len(results) == 1
    assert ("cannot build" in results.pop()) is fails
    assert calls.read_text() == "call\n"
