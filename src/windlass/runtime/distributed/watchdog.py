"""The watchdog process beside each rank of a cluster; it computes nothing, so it never blocks.

It starts the rank and publishes the rank's status to the other watchdogs. When a rank dies, is
stopped or hangs, or its host is no longer heard from, all watchdogs agree on one message: which
rank, where, and at which instruction. Each then kills its own rank, because a rank blocked inside
gloo could not exit by itself.
"""

import contextlib
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from windlass.atomic_files import storage_errors
from windlass.errors import RankLost, RunInterrupted, WindlassError
from windlass.program import MeshCoord, Program
from windlass.runtime.distributed.failure_report import (
    FailureDiagnoser,
    describe_rank,
    find_blocking_rank,
    hang_message,
)
from windlass.runtime.distributed.heartbeat import NOT_STARTED, HeartbeatReader
from windlass.runtime.distributed.local_launcher import (
    StallTimer,
    WatchdogTimeouts,
    exit_code,
    kill_process_groups,
)
from windlass.runtime.distributed.rank_ipc import (
    STOP,
    heartbeat_file,
    read_report,
    reserve_report,
    stderr_file,
    write_report,
)
from windlass.runtime.distributed.status_store import RankStatus, StatusStore

_POLL_SECONDS = 0.1
_AGREE_SECONDS = 3.0
"""Time that watchdogs have to agree on a message, and to hear of it. Three times this and one poll
stay below the ten seconds within which the whole run must end."""
_OWN_REPORT_SECONDS = 1.5
"""Time that other watchdogs leave to the one of the hanging rank, which can include its stacks."""


class RankWatchdog:
    """One rank of a cluster, watched from a process beside it.

    Args:
        folder: the ranks folder.
        command: starts the rank.
        rank: the rank.
        coords: the mesh coordinates of all ranks.
        programs: gives the programs of all ranks; called only when a rank has to be described.
        store: shared with the watchdogs of all other ranks.
        timeouts: when to report a hang.

    Raises:
        StorageError: the folder cannot be written to.
    """

    def __init__(
        self,
        folder: Path,
        command: Sequence[str],
        rank: int,
        coords: Sequence[MeshCoord],
        programs: Callable[[], Sequence[Program]],
        store: StatusStore,
        timeouts: WatchdogTimeouts,
    ) -> None:
        self._folder, self._rank, self._coords = folder, rank, coords
        self._programs, self._store, self._timeouts = programs, store, timeouts
        reserve_report(folder, rank)
        with storage_errors(folder):
            heartbeat_file(folder, rank).unlink(missing_ok=True)
            with stderr_file(folder, rank).open("wb") as stderr:
                self._process = subprocess.Popen(  # noqa: S603  our own words, no shell
                    command, stdin=subprocess.PIPE, stderr=stderr, process_group=0
                )
        self._heartbeat = HeartbeatReader(heartbeat_file(folder, rank))

    def watch(self, stop: Callable[[], bool]) -> None:
        """Returns when the rank has completed the run.

        Args:
            stop: polled continuously; True lets all ranks end after the current step.

        Raises:
            WindlassError: a rank failed; the message names it, its coordinates and instruction.
        """
        timer, stop_sent = StallTimer(), False
        while (code := exit_code(self._process)) is None:
            if not stop_sent and stop():
                self._send_stop()
                stop_sent = True
            self._store.publish(self._status())
            if self._store.failure_message is not None:
                raise self._rank_lost(self._store.failure_message)
            self._raise_if_hanging(timer)
            time.sleep(_POLL_SECONDS)
        if code:
            raise self._failure(code)
        self._store.publish(self._status()._replace(finished=True))
        self._store.flush(_AGREE_SECONDS)

    def close(self) -> None:
        """Kills the rank, with all that it has started, once all watchdogs know why."""
        if self._store.failure_message is not None:
            self._store.wait_until_all_know(_AGREE_SECONDS)
        kill_process_groups([self._process])
        self._heartbeat.close()

    def _status(self) -> RankStatus:
        stopped = bool(self._diagnoser().stopped_ranks())
        return RankStatus(*self._heartbeat.read(), stopped=stopped, finished=False)

    def _diagnoser(self, programs: Sequence[Program] = ()) -> FailureDiagnoser:
        return FailureDiagnoser(
            self._folder, programs, self._coords, {self._rank: self._heartbeat},
            {self._rank: self._process},
        )  # fmt: skip

    def _send_stop(self) -> None:
        pipe = self._process.stdin
        if pipe:
            with contextlib.suppress(BrokenPipeError):
                pipe.write(STOP)
                pipe.flush()

    def _failure(self, code: int) -> WindlassError:
        """The error of this rank, or that of another rank if this one only followed it."""
        error = self._diagnoser(self._programs()).diagnose({self._rank: code})
        if isinstance(error, RunInterrupted):
            return error
        report = read_report(self._folder, self._rank)
        if report and report["is_consequence"]:
            reason = str(report["message"]).partition("\n")[0]
            name = self._describe(self._rank, self._heartbeat.position())
            message = f"{name}: another rank is gone ({reason})"
            return self._rank_lost(self._store.wait_for_failure(_AGREE_SECONDS) or message)
        own_message = str(error)
        agreed = self._store.agree_on_failure(own_message, _AGREE_SECONDS)
        return error if agreed == own_message else self._rank_lost(agreed)

    def _rank_lost(self, message: str) -> RankLost:
        """The error that all watchdogs raise alike."""
        error = RankLost(message, rank=self._rank, permanent=False)
        write_report(self._folder, self._rank, error)
        return error

    def _raise_if_hanging(self, timer: StallTimer) -> None:
        """Raises if the run hangs, or a host cannot be reached.

        Raises:
            RankLost: no rank makes progress, or one is no longer heard from.
        """
        self._raise_if_unreachable()
        timeouts, statuses = self._timeouts, self._store.statuses
        running = {rank: status for rank, status in statuses.items() if not status.finished}
        stalled = timer.seconds_without_progress([status[:3] for status in statuses.values()])
        if not running or stalled < timeouts.hang_seconds:
            return
        stopped = [rank for rank, status in running.items() if status.stopped]
        started = all(status[:2] > NOT_STARTED for status in running.values())
        if started or stopped or stalled > timeouts.startup_seconds:
            positions = {rank: status[:2] for rank, status in running.items()}
            rank = find_blocking_rank(positions, stopped, self._programs())
            message = hang_message(stalled, stopped=rank in stopped)
            raise self._agreed_error(
                rank,
                f"{self._describe(rank, positions[rank])} {message}",
                with_stacks=rank not in stopped,
            )

    def _raise_if_unreachable(self) -> None:
        """Raises if the store, or the watchdog of another rank, has been silent for too long."""
        hang_seconds, statuses = self._timeouts.hang_seconds, self._store.statuses
        silent = self._store.seconds_since_answer()
        if silent > hang_seconds:
            name = self._describe(self._rank, self._heartbeat.position())
            raise self._rank_lost(
                f"{name} cannot reach the other ranks: their store has not answered for "
                f"{silent:.0f} s; its host, the store's host, or the link between them is down"
            )
        unheard = {
            rank: seconds
            for rank, seconds in self._store.seconds_since_heard().items()
            if seconds > hang_seconds
        }
        if unheard:
            rank = min(unheard, key=lambda other: statuses[other][:2])
            name = self._describe(rank, statuses[rank][:2])
            message = f"{name} was last heard from {unheard[rank]:.0f} s ago"
            raise self._agreed_error(
                rank, f"{message}: its host, or the link to it, is down", with_stacks=False
            )

    def _agreed_error(self, rank: int, message: str, *, with_stacks: bool) -> RankLost:
        """The error on a hanging rank, whose own watchdog gives the message first if it can."""
        if rank != self._rank:
            return self._rank_lost(
                self._store.wait_for_failure(_OWN_REPORT_SECONDS)
                or self._store.agree_on_failure(message, _AGREE_SECONDS)
            )
        if with_stacks and exit_code(self._process) is None:
            message += self._diagnoser().thread_stacks(rank)
        return self._rank_lost(self._store.agree_on_failure(message, _AGREE_SECONDS))

    def _describe(self, rank: int, position: tuple[int, int]) -> str:
        return describe_rank(rank, self._coords[rank], self._programs()[rank], position)
