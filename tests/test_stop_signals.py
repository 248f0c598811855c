"""Stop signals: who obeys them, and who leaves them to its parent."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from factories import tiny_graph, tiny_machine, tiny_plan
from windlass.child_processes import ChildProcesses, kill_process_groups
from windlass.errors import RunInterrupted
from windlass.program import lower, mesh_coord
from windlass.runtime import LocalLauncher, RankPlacement, WatchdogTimeouts
from windlass.stop_signals import STOP_SIGNALS, end_until_asked, graceful_stop

_DEAF = """
import sys, time
from windlass.stop_signals import ignore_stop_signals
sys.stdout.write("begun\\n"); sys.stdout.flush()
sys.stdin.readline()
ignore_stop_signals()
sys.stdout.write("deaf\\n"); sys.stdout.flush()
sys.stdin.readline()
"""
_CLOSED = """
import os, pty, signal, sys, time
from windlass.stop_signals import graceful_stop
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # as in a terminal, also where the tests run in none
child, terminal = pty.fork()
if child:
    os.read(terminal, 5)
    os.close(terminal)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
with graceful_stop() as stop:
    stop()
    os.write(1, b"ready")
    while not stop():
        time.sleep(0.01)
    print("saved", flush=True)
os._exit(7)
"""
"""A process in a terminal, which its parent closes."""


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_each_stop_signal_requests_a_stop_and_nothing_more(number: signal.Signals) -> None:
    # The tests may themselves run behind `nohup`.
    before = signal.signal(number, signal.default_int_handler)
    try:
        with graceful_stop() as stop:
            assert not stop()
            signal.raise_signal(number)
            assert stop()
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_stop_signal_ends_at_once_what_prepares_and_asks_nobody(number: signal.Signals) -> None:
    before = signal.signal(number, signal.default_int_handler)
    try:
        with graceful_stop() as stop, pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        with graceful_stop() as stop:
            assert not stop()
            end_until_asked(stop)  # as the next run of a recipe begins with planning
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(number)
    finally:
        signal.signal(number, before)


def test_behind_nohup_a_closed_terminal_stops_nothing() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with graceful_stop() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_rank_outlives_stop_signals_that_come_while_it_starts_and_later(tmp_path: Path) -> None:
    processes = ChildProcesses([sys.executable, "-c", _DEAF])
    with (tmp_path / "errors").open("wb") as errors:
        child = processes.start(
            [], name="rank 0", output=subprocess.PIPE, errors=errors, environment=os.environ
        )
    assert child.stdin
    assert child.stdout
    for word in (b"begun\n", b"deaf\n"):
        assert child.stdout.readline() == word
        for number in STOP_SIGNALS:
            child.send_signal(number)
        child.stdin.write(b"\n")
        child.stdin.flush()
    assert child.wait() == 0
    child.stdout.close()
    kill_process_groups([child])


def test_output_after_a_terminal_has_closed_goes_to_nobody_and_is_no_error() -> None:
    ended = subprocess.run([sys.executable, "-c", _CLOSED], timeout=30, check=False)
    assert ended.returncode == 7


def test_ranks_that_have_begun_no_step_are_ended_when_a_stop_is_asked_for(tmp_path: Path) -> None:
    graph = tiny_graph()
    plan = tiny_plan(graph, tiny_machine(devices=2), data=2)
    launcher = LocalLauncher(
        tmp_path, ChildProcesses((sys.executable, "-c", "import time; time.sleep(600)")), (),
        lower(plan, graph), [mesh_coord(rank, plan.parallel) for rank in range(2)],
        timeouts=WatchdogTimeouts(hang_seconds=60, compile_seconds=0),
        placements=[RankPlacement(frozenset(os.sched_getaffinity(0)), 1)] * 2,
    )  # fmt: skip
    try:
        with pytest.raises(RunInterrupted, match="before a step began"):
            next(launcher.steps(lambda: True))
    finally:
        launcher.close()
