"""A process that a server forks is a child of the one that asks, as one that it starts itself."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from windlass.child_processes import (
    ChildProcess,
    ChildProcesses,
    exit_code,
    kill_process_groups,
)
from windlass.fork_server import ForkServer

SERVED = """
import json, os, sys, time
from windlass.fork_server import serve_forks
imported = os.getpid()
words = serve_forks(int(sys.argv[1])).words
"""
ALONE = "import json, os, sys, time\nwords = sys.argv[1:]\n"
PROGRAM = """
print("told", file=sys.stderr, flush=True)
if words[0] == "report":
    told = {
        "parent": os.getppid(), "group": os.getpgid(0) == os.getpid(),
        "cores": sorted(os.sched_getaffinity(0)), "variable": os.environ["GIVEN"],
        "input": sys.stdin.read(), "open": sorted(map(int, os.listdir("/proc/self/fd")))[:3],
    }
    print(json.dumps(told), flush=True)
elif words[0] == "wait":
    print("waits", flush=True)
    sys.stdin.read()
sys.exit(int(words[1]))
"""
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux adopts processes")

Start = Callable[..., ChildProcess]


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with closing(ForkServer((sys.executable, "-c", SERVED + PROGRAM))) as serving:
        yield serving


@pytest.fixture(params=["forked", "started anew"])
def start(request: pytest.FixtureRequest, server: ForkServer, tmp_path: Path) -> Iterator[Start]:
    """Starts the program, by a server or without one; its error stream is in `errors`."""
    forks = request.param == "forked"
    alone = (sys.executable, "-c", ALONE + PROGRAM)
    processes = ChildProcesses(("nobody",) if forks else alone, server if forks else None)
    started: list[ChildProcess] = []

    def start(*words: str) -> ChildProcess:
        with (tmp_path / "errors").open("wb") as errors:
            process = processes.start(
                words, name="rank 7", output=subprocess.PIPE, errors=errors,
                environment={**os.environ, "GIVEN": "yes"},
            )  # fmt: skip
        started.append(process)
        return process

    yield start
    kill_process_groups(started)
    for process in started:
        process.stdout.close()


def test_a_process_has_its_parent_group_streams_cores_and_variables(start: Start, tmp_path: Path):
    process = start("report", "0")
    process.stdin.write(b"heard")
    process.stdin.close()
    assert json.loads(process.stdout.read()) == {
        "parent": os.getpid(), "group": True, "cores": sorted(os.sched_getaffinity(0)),
        "variable": "yes", "input": "heard", "open": [0, 1, 2],
    }  # fmt: skip
    assert process.wait() == 0
    assert (tmp_path / "errors").read_text() == "told\n"


def test_an_exit_code_is_known_before_and_after_the_process_is_waited_for(start: Start):
    process = start("end", "5")
    deadline = time.monotonic() + 60
    while exit_code(process) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (exit_code(process), process.wait(), exit_code(process)) == (5, 5, 5)


def test_a_killed_process_ends_with_the_number_of_its_signal(start: Start):
    process = start("wait", "0")
    assert process.stdout.readline() == b"waits\n"
    assert exit_code(process) is None
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def test_a_forked_process_outlives_its_server_and_bears_its_name(tmp_path: Path):
    server = ForkServer((sys.executable, "-c", SERVED + PROGRAM))
    with closing(server), (tmp_path / "errors").open("wb") as errors:
        process = server.fork(
            ("wait", "3"), name="rank 7", output=subprocess.DEVNULL, errors=errors,
            environment=os.environ,
        )  # fmt: skip
    assert Path(f"/proc/{process.pid}/comm").read_text() == "rank 7\n"
    process.stdin.close()
    assert process.wait() == 3


def test_without_its_server_a_process_is_started_anew(tmp_path: Path):
    gone = ForkServer((sys.executable, "-c", ""))
    processes = ChildProcesses((sys.executable, "-c", ALONE + PROGRAM), gone)
    with closing(gone), (tmp_path / "errors").open("wb") as errors:
        process = processes.start(
            ("end", "4"), name="rank 0", output=subprocess.DEVNULL, errors=errors,
            environment=os.environ,
        )  # fmt: skip
    assert process.wait() == 4
    process.stdin.close()
