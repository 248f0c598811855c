"""The process on each host of a cluster that starts the host's ranks; it computes nothing.

So it never blocks. It publishes the status of its ranks to the watchdogs of the other hosts. When a
rank dies, is stopped or hangs, or its host is no longer heard from, all watchdogs agree on one
message: which rank, where, and at which instruction. Each then kills its own ranks, because a rank
blocked inside gloo could not exit by itself.
"""

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from windlass.atomic_files import storage_errors
from windlass.child_processes import (
    ChildProcess,
    ChildProcesses,
    exit_code,
    kill_process_groups,
)
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
)
from windlass.runtime.distributed.rank_ipc import (
    STOP,
    flight_record_file,
    heartbeat_file,
    read_report,
    reserve_report,
    stderr_file,
    write_report,
)
from windlass.runtime.distributed.rank_placement import RankPlacement, on_cores
from windlass.runtime.distributed.status_store import RankStatus, StatusStore

_POLL_SECONDS = 0.1
_AGREE_SECONDS = 3.0
"""Time that watchdogs have to agree on a message, and to hear of it. Three times this and one poll
stay below the ten seconds within which the whole run must end."""
_OWN_REPORT_SECONDS = 1.5
"""Time that other watchdogs leave to the one of the hanging rank, which can include its stacks."""


class HostWatchdog:
    """All ranks of one host of a cluster during one attempt.

    Args:
        programs: gives the programs of all ranks; called only when a rank has to be described.
        placements: the cores of each rank of this host, in the order of the ranks.

    Raises:
        StorageError: the folder cannot be written to.
    """

    def __init__(
        self,
        folder: Path,
        processes: ChildProcesses,
        words: Mapping[int, Sequence[str]],
        coords: Sequence[MeshCoord],
        programs: Callable[[], Sequence[Program]],
        store: StatusStore,
        timeouts: WatchdogTimeouts,
        *,
        placements: Sequence[RankPlacement],
    ) -> None:
        self._folder, self._coords = folder, coords
        self._programs, self._store, self._timeouts = programs, store, timeouts
        self._processes: dict[int, ChildProcess] = {}
        self._heartbeats: dict[int, HeartbeatReader] = {}
        try:
            for (rank, each), placement in zip(words.items(), placements, strict=True):
                with on_cores(placement.cores):
                    self._processes[rank] = self._start(processes, rank, each, placement.threads)
                self._heartbeats[rank] = HeartbeatReader(heartbeat_file(folder, rank))
        except BaseException:
            kill_process_groups([*self._processes.values()])
            raise

    def _start(
        self, processes: ChildProcesses, rank: int, words: Sequence[str], threads: int
    ) -> ChildProcess:
        reserve_report(self._folder, rank)
        with storage_errors(self._folder):
            heartbeat_file(self._folder, rank).unlink(missing_ok=True)
            flight_record_file(self._folder, rank).unlink(missing_ok=True)
            with stderr_file(self._folder, rank).open("wb") as stderr:
                return processes.start(
                    words, name=f"rank {rank}", output=None, errors=stderr,
                    # A number that the user, or the launch script, has chosen wins.
                    environment={"OMP_NUM_THREADS": str(threads), **os.environ},
                )  # fmt: skip

    def watch(self, stop: Callable[[], bool]) -> None:
        """Returns when all ranks of all hosts have completed the run.

        Args:
            stop: polled continuously; True lets all ranks end after the current step.

        Raises:
            RunInterrupted: the ranks have saved the run and ended, as `stop` asked.
            WindlassError: a rank failed; the message names it, its coordinates and instruction.
        """
        timer, stop_sent = StallTimer(), False
        while not self._store.finished():
            if not stop_sent and stop():
                self._send_stop()
                stop_sent = True
            statuses = self._statuses()
            self._store.publish(statuses)
            if self._store.failure_message is not None:
                raise self._rank_lost(self._store.failure_message)
            self._raise_if_failed()
            self._raise_if_hanging(timer)
            if all(status.finished for status in statuses.values()):
                self._store.exchange(_POLL_SECONDS)
            time.sleep(_POLL_SECONDS)
        for rank in self._processes:
            if message := self._interruption(rank):
                raise RunInterrupted(message)

    def close(self) -> None:
        """Kills the ranks, with all that they have started, once all watchdogs know the end."""
        if self._store.failure_message is not None or self._store.finished():
            self._store.wait_until_all_know(_AGREE_SECONDS)
        self._store.close()
        kill_process_groups([*self._processes.values()])
        for heartbeat in self._heartbeats.values():
            heartbeat.close()

    def _statuses(self) -> Mapping[int, RankStatus]:
        stopped = self._diagnoser().stopped_ranks()
        return {
            rank: RankStatus(
                *self._heartbeats[rank].read(),
                stopped=rank in stopped,
                finished=self._has_ended(rank, exit_code(process)),
            )
            for rank, process in self._processes.items()
        }

    def _has_ended(self, rank: int, code: int | None) -> bool:
        """Whether a rank has exited because the run is complete, or because it was asked to."""
        return code == 0 or (code is not None and self._interruption(rank) is not None)

    def _interruption(self, rank: int) -> str | None:
        """What a rank has reported when it ended as it was asked to; None if it did not."""
        report = read_report(self._folder, rank)
        interrupted = report is not None and report["kind"] == RunInterrupted.__name__
        return str(report["message"]) if report and interrupted else None

    def _diagnoser(self, programs: Sequence[Program] = ()) -> FailureDiagnoser:
        return FailureDiagnoser(
            self._folder, programs, self._coords, self._heartbeats, self._processes
        )

    def _send_stop(self) -> None:
        for process in self._processes.values():
            if process.stdin:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(STOP)
                    process.stdin.flush()

    def _raise_if_failed(self) -> None:
        """Raises the error of the first rank here to fail, if any has.

        Raises:
            WindlassError: what that rank reported, or what another host has said first.
        """
        codes = {rank: exit_code(process) for rank, process in self._processes.items()}
        failed = {
            rank: code for rank, code in codes.items() if code and not self._has_ended(rank, code)
        }
        if failed:
            raise self._failure(failed)

    def _failure(self, failed: Mapping[int, int]) -> WindlassError:
        """The error of a rank here, or that of another host if these only followed it."""
        error = self._diagnoser(self._programs()).diagnose(failed)
        reports = {rank: read_report(self._folder, rank) for rank in self._processes}
        unreported = [rank for rank in failed if reports[rank] is None]
        if not unreported and all(
            report["is_consequence"] for report in reports.values() if report
        ):
            rank = min(failed)
            reason = str((reports[rank] or {}).get("message")).partition("\n")[0]
            name = self._describe(rank, self._heartbeats[rank].position())
            message = f"{name}: another rank is gone ({reason})"
            return self._rank_lost(self._store.wait_for_failure(_AGREE_SECONDS) or message)
        own_message = str(error)
        agreed = self._store.agree_on_failure(own_message, _AGREE_SECONDS)
        return error if agreed == own_message else self._rank_lost(agreed)

    def _rank_lost(self, message: str) -> RankLost:
        """The error that all watchdogs raise alike."""
        error = RankLost(message, rank=min(self._processes), permanent=False)
        for rank in self._processes:
            write_report(self._folder, rank, error)
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
            rank = min(self._processes)
            name = self._describe(rank, self._heartbeats[rank].position())
            raise self._rank_lost(
                f"{name} cannot reach the other hosts: their store has not answered for "
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
        if rank not in self._processes:
            return self._rank_lost(
                self._store.wait_for_failure(_OWN_REPORT_SECONDS)
                or self._store.agree_on_failure(message, _AGREE_SECONDS)
            )
        if with_stacks and exit_code(self._processes[rank]) is None:
            message += self._diagnoser().evidence(rank)
        return self._rank_lost(self._store.agree_on_failure(message, _AGREE_SECONDS))

    def _describe(self, rank: int, position: tuple[int, int]) -> str:
        return describe_rank(rank, self._coords[rank], self._programs()[rank], position)
