"""Launches the ranks of a run as processes of this host, and watches them until they exit.

Each rank gets the run's folder and the file to meet at. Its standard input is a pipe from this
process: the rank exits when that pipe closes, whatever it is waiting for. It writes its heartbeat
to a mapped file, and a failure report to a file of its own. Rank 0 reports each step, and is told
once the step is on record: no checkpoint of a step exists before that. Rank 0 ends with `null` once
the last checkpoint is complete.
"""

import contextlib
import json
import os
import queue
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from windlass.atomic_files import storage_errors
from windlass.child_processes import (
    ChildProcess,
    ChildProcesses,
    exit_code,
    kill_process_groups,
)
from windlass.errors import RunInterrupted
from windlass.program import MeshCoord, Program
from windlass.runtime.distributed.failure_report import FailureDiagnoser
from windlass.runtime.distributed.heartbeat import NOT_STARTED, HeartbeatReader
from windlass.runtime.distributed.rank_ipc import (
    RANKS_FOLDER,
    STEP_RECORDED,
    STOP,
    heartbeat_file,
    reserve_report,
    stderr_file,
)
from windlass.runtime.distributed.rank_placement import RankPlacement, on_cores
from windlass.runtime.distributed.rendezvous import create_store_file

_POLL_SECONDS = 0.1
_EXIT_SECONDS = 3.0
"""Time that the other ranks have to exit by themselves once one has."""
_STARTUP_FACTOR = 5
"""Factor on the hang timeout until all ranks have started: they build models and load code."""
_MIN_STARTUP_SECONDS = 60.0
"""Lower bound of the startup timeout: on a busy machine loading code alone takes half of it."""


class WatchdogTimeouts(NamedTuple):
    """How long ranks may make no progress, in seconds, before a hang is reported."""

    hang_seconds: float
    """Timeout once all ranks have started, or if one is stopped."""
    compile_seconds: float
    """Additional time before the first step, for compilation."""

    @property
    def startup_seconds(self) -> float:
        """Timeout until all ranks have started."""
        scaled = _STARTUP_FACTOR * (self.hang_seconds + self.compile_seconds)
        return max(_MIN_STARTUP_SECONDS, scaled)


class LocalLauncher:
    """All ranks of a run, each a process of this host.

    Args:
        words: command line of every rank; the store's file and the rank are appended.

    Raises:
        StorageError: the folder cannot be written to.
    """

    def __init__(
        self,
        folder: Path,
        processes: ChildProcesses,
        words: Sequence[str],
        programs: Sequence[Program],
        coords: Sequence[MeshCoord],
        *,
        timeouts: WatchdogTimeouts,
        placements: Sequence[RankPlacement],
    ) -> None:
        self._folder = folder / RANKS_FOLDER
        self._timeouts = timeouts
        ranks = range(len(programs))
        with storage_errors(self._folder):
            if self._folder.exists():
                shutil.rmtree(self._folder)
            self._folder.mkdir()
        for rank in ranks:
            reserve_report(self._folder, rank)
        of_all = [*words, "--store", str(create_store_file(self._folder))]
        self._heartbeats = [HeartbeatReader(heartbeat_file(self._folder, rank)) for rank in ranks]
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        self._processes: list[ChildProcess] = []
        try:
            for rank in ranks:
                self._processes.append(self._start(processes, of_all, rank, placements[rank]))
        except BaseException:
            kill_process_groups(self._processes)
            raise
        self._diagnoser = FailureDiagnoser(
            self._folder, programs, coords, dict(enumerate(self._heartbeats)),
            dict(enumerate(self._processes)),
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _start(
        self, processes: ChildProcesses, words: Sequence[str], rank: int, placement: RankPlacement
    ) -> ChildProcess:
        with stderr_file(self._folder, rank).open("wb") as stderr, on_cores(placement.cores):
            return processes.start(
                [*words, "--rank", str(rank)],
                name=f"rank {rank}",
                output=subprocess.DEVNULL if rank else subprocess.PIPE,
                errors=stderr,
                environment={**os.environ, "OMP_NUM_THREADS": str(placement.threads)},
            )

    def _read(self) -> None:
        """Reads the lines of rank 0 until it exits."""
        stdout = self._processes[0].stdout
        for line in stdout or ():
            self._lines.put(line)
        self._lines.put(None)

    def steps(self, stop: Callable[[], bool]) -> Iterator[Mapping[str, Any]]:
        """Yields rank 0's report of each step until all ranks have exited.

        A caller that asks for the next step has put the previous one on record.

        Args:
            stop: polled continuously; True lets the ranks end after the current step.

        Raises:
            RunInterrupted: `stop` returned True before any rank began a step.
            WindlassError: a rank failed; the message names it, its coordinates and instruction.
        """
        timer, stop_sent = StallTimer(), False
        while True:
            if not stop_sent and stop():
                if not any(step for step, _ in map(HeartbeatReader.position, self._heartbeats)):
                    raise RunInterrupted("stopped before a step began")
                self._tell_rank_0(STOP)
                stop_sent = True
            with contextlib.suppress(queue.Empty):
                line = self._lines.get(timeout=_POLL_SECONDS)
                if line is None:
                    break
                step: Mapping[str, Any] | None = json.loads(line)
                if step is None:
                    self._wait_for_exit()
                    return
                yield step
                self._tell_rank_0(STEP_RECORDED)
                timer = StallTimer()  # the caller may have taken its time with the step
                continue
            self._raise_if_failed()
            self._raise_if_hanging(timer)
        self._wait_for_exit()
        self._raise_if_failed()

    def wait_until_saved(self, path: Path) -> None:
        """Lets the last reported step be saved; returns once it is, or never will be."""
        self._tell_rank_0(STEP_RECORDED)
        timer = StallTimer()
        while not path.exists():
            stalled = timer.seconds_without_progress([beat.read() for beat in self._heartbeats])
            codes = [exit_code(process) for process in self._processes]
            if stalled > self._timeouts.hang_seconds or any(code is not None for code in codes):
                return
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """Kills every rank that has not exited, with all processes that it has started."""
        kill_process_groups(self._processes)
        self._reader.join()
        if stdout := self._processes[0].stdout:
            stdout.close()  # a run of several legs starts ranks again and again
        for heartbeat in self._heartbeats:
            heartbeat.close()

    def _tell_rank_0(self, message: bytes) -> None:
        pipe = self._processes[0].stdin
        if pipe:
            with contextlib.suppress(BrokenPipeError):
                pipe.write(message)
                pipe.flush()

    def _wait_for_exit(self) -> None:
        """Waits briefly for all ranks to exit; returns early if one fails."""
        deadline = time.monotonic() + _EXIT_SECONDS
        while time.monotonic() < deadline:
            codes = [exit_code(process) for process in self._processes]
            if any(codes) or None not in codes:
                return
            time.sleep(_POLL_SECONDS)

    def _raise_if_failed(self) -> None:
        """Raises the error of the first rank to fail, if any has.

        Raises:
            WindlassError: of the type that the rank reported.
        """
        codes = {rank: exit_code(process) for rank, process in enumerate(self._processes)}
        failed = {rank: code for rank, code in codes.items() if code}
        if failed:
            raise self._diagnoser.diagnose(failed)

    def _raise_if_hanging(self, timer: "StallTimer") -> None:
        """Raises if no rank has made progress for longer than the timeout.

        Raises:
            RankLost: names the rank that the others wait for.
        """
        stalled = timer.seconds_without_progress([beat.read() for beat in self._heartbeats])
        if stalled < self._timeouts.hang_seconds:
            return
        started = all(beat.position() > NOT_STARTED for beat in self._heartbeats)
        stopped = self._diagnoser.stopped_ranks
        if started or stopped() or stalled > self._timeouts.startup_seconds:
            raise self._diagnoser.diagnose_hang(stalled)


class StallTimer:
    """Measures for how long no heartbeat has changed."""

    def __init__(self) -> None:
        self._seen: list[tuple[int, int, int]] = []
        self._since = time.monotonic()

    def seconds_without_progress(self, heartbeats: Sequence[tuple[int, int, int]]) -> float:
        """Seconds since these heartbeats, one a rank, were first seen."""
        if list(heartbeats) != self._seen:
            self._seen, self._since = list(heartbeats), time.monotonic()
        return time.monotonic() - self._since
