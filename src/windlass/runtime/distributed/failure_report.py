"""Diagnosis of a failed or hanging run: which rank caused it, at which instruction, and why."""

import contextlib
import json
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from windlass import errors
from windlass.child_processes import ChildProcess
from windlass.errors import OutOfMemory, RankError, RankLost, RunBroken, WindlassError
from windlass.program import BLOCKING_KINDS, InstructionKind, MeshCoord, Program
from windlass.runtime.distributed.heartbeat import NOT_STARTED, HeartbeatReader
from windlass.runtime.distributed.rank_ipc import (
    WRITE_FLIGHT_RECORD,
    flight_record_file,
    read_report,
    stderr_file,
)

_REPORT_SECONDS = 0.2
"""Time for other ranks to report too once one has exited, and for a rank to write its stacks."""
_LONGEST_EXCERPT = 2000
_STOPPED = ("T", "t")
_EXTERNAL_SIGNALS = frozenset(signal.Signals) - {signal.SIGABRT}
"""Signals that come from outside. A process aborts itself, perhaps only because a peer is gone."""


class FailureDiagnoser:
    """Finds the rank that caused a failure or a hang, from the ranks that this process can see."""

    def __init__(
        self,
        folder: Path,
        programs: Sequence[Program],
        coords: Sequence[MeshCoord],
        heartbeats: Mapping[int, HeartbeatReader],
        processes: Mapping[int, ChildProcess],
    ) -> None:
        self._folder, self._programs, self._coords = folder, programs, coords
        self._heartbeats, self._processes = heartbeats, processes

    def diagnose(self, exit_codes: Mapping[int, int]) -> WindlassError:
        """The error of the first rank to fail."""
        # The first to fail reports at once; the others fail only because it is gone.
        time.sleep(_REPORT_SECONDS)
        reports = {
            rank: report for rank in self._processes if (report := read_report(self._folder, rank))
        }
        unreported = {rank: code for rank, code in exit_codes.items() if rank not in reports}
        for rank, code in unreported.items():
            if -code in _EXTERNAL_SIGNALS:
                return self._killed(rank, signal.Signals(-code))
        for rank, report in reports.items():
            if not report["is_consequence"]:
                return self._reported_error(rank, report)
        for rank, code in unreported.items():
            message = f"{self.describe(rank)} exited with code {code}{self._stderr_tail(rank)}"
            return RankLost(message, rank=rank, permanent=False)
        return self._reported_error(*next(iter(reports.items())))

    def diagnose_hang(self, seconds: float) -> RankLost:
        """The error that names the rank the others wait for, with the stacks of its threads."""
        stopped = self.stopped_ranks()
        positions = {rank: beat.position() for rank, beat in self._heartbeats.items()}
        rank = find_blocking_rank(positions, stopped, self._programs)
        if not stopped and (absent := never_joined(self._flight_records())):
            rank = absent[0]
        message = f"{self.describe(rank)} {hang_message(seconds, stopped=rank in stopped)}"
        message += "" if rank in stopped else self.evidence(rank)
        return RankLost(message, rank=rank, permanent=False)

    def evidence(self, rank: int) -> str:
        """What running ranks write on request: last collectives of all, thread stacks of one.

        Args:
            rank: the rank that is blamed; the others wait for it.
        """
        absent = never_joined(self._flight_records())
        self._processes[rank].send_signal(signal.SIGUSR1)
        time.sleep(_REPORT_SECONDS)
        files = (flight_record_file(self._folder, each) for each in self._processes)
        written = [str(file) for file in files if file.exists()]
        named = f"`{written[0]}` and {len(written) - 1} files beside it" if written else ""
        flight = f"; what each rank has asked of its peers is in {named}" if written else ""
        return (f"; {absent[1]}" if absent else "") + flight + self._stderr_tail(rank)

    def _flight_records(self) -> dict[int, Mapping[str, Any]]:
        """The last collectives of the ranks that this process can see, which write them now."""
        files = {rank: flight_record_file(self._folder, rank) for rank in self._processes}
        for process in self._processes.values():
            if process.stdin:
                with contextlib.suppress(OSError):
                    process.stdin.write(WRITE_FLIGHT_RECORD)
                    process.stdin.flush()
        time.sleep(_REPORT_SECONDS)
        records: dict[int, Mapping[str, Any]] = {}
        for rank, file in files.items():
            with contextlib.suppress(OSError, ValueError):
                records[rank] = json.loads(file.read_bytes())
        return records

    def stopped_ranks(self) -> list[int]:
        """The ranks that a signal or a debugger has stopped."""
        return [rank for rank, p in self._processes.items() if _process_state(p.pid) in _STOPPED]

    def describe(self, rank: int) -> str:
        """A rank with its mesh coordinates and its current instruction; see `describe_rank`."""
        position = self._heartbeats[rank].position()
        return describe_rank(rank, self._coords[rank], self._programs[rank], position)

    def _killed(self, rank: int, by: signal.Signals) -> RankLost:
        hint = ", which the system also sends when memory runs out" if by == signal.SIGKILL else ""
        tail = self._stderr_tail(rank)
        message = f"{self.describe(rank)} was killed by {by.name}{hint}{tail}"
        return RankLost(message, rank=rank, permanent=True)

    def _reported_error(self, rank: int, report: Mapping[str, Any]) -> WindlassError:
        """The error that a rank has reported, as the same type."""
        kind, reported = report["kind"], str(report["message"])
        if kind == "RunInterrupted":
            return errors.RunInterrupted(reported)
        message = f"{self.describe(rank)}: {reported}"
        if kind == "OutOfMemory":
            return OutOfMemory(message, available_bytes=report["available_bytes"])
        if not report["is_windlass_error"]:
            trace = stderr_file(self._folder, rank)
            return RankError(
                f"{self.describe(rank)}: {kind}: {reported}; its traceback is in `{trace}`"
            )
        error_type = getattr(errors, kind, RunBroken)
        return RunBroken(message) if error_type is errors.InputErrors else error_type(message)

    def _stderr_tail(self, rank: int) -> str:
        with contextlib.suppress(OSError):
            text = stderr_file(self._folder, rank).read_text(errors="replace").strip()
            return f"; its error stream ends with:\n{text[-_LONGEST_EXCERPT:]}" if text else ""
        return ""


def never_joined(records: Mapping[int, Mapping[str, Any]]) -> tuple[int, str] | None:
    """The rank that others wait for in a collective, and which one that is; None if none is.

    Ranks number the collectives of a group alike, so one that is behind has not joined.

    Args:
        records: torch's flight record of each rank.
    """
    groups: dict[str, dict[int, tuple[int, str]]] = {}
    for rank, record in records.items():
        for entry in record.get("entries", ()):
            if not entry["is_p2p"]:
                last = groups.setdefault(str(entry["process_group"][0]), {})
                number = (int(entry["collective_seq_id"]), str(entry["profiling_name"]))
                last[rank] = max(number, last.get(rank, number))
    for last in groups.values():
        rank = min(last, key=lambda each: last[each][0])
        furthest, name = max(last.values())
        if last[rank][0] < furthest:
            waiting = ", ".join(str(each) for each in last if last[each][0] == furthest)
            return rank, (
                f"it never joined `{name}`, collective {furthest} of its group, in which rank "
                f"{waiting} waits"
            )
    return None


def find_blocking_rank(
    positions: Mapping[int, tuple[int, int]], stopped: Collection[int], programs: Sequence[Program]
) -> int:
    """The rank that hanging ranks wait for.

    Preferred in this order: a stopped rank, one that is not waiting for others, the one that is
    furthest behind.
    """
    busy = [
        rank
        for rank, (_, index) in positions.items()
        if _kind(programs[rank], index) not in BLOCKING_KINDS
    ]
    return min(stopped or busy or positions, key=lambda rank: positions[rank])


def hang_message(seconds: float, *, stopped: bool) -> str:
    """What is said about the rank that the others wait for."""
    state = "is stopped (by a signal; SIGCONT resumes it)" if stopped else "hangs"
    return f"{state}: no progress for {seconds:.0f} s on any rank"


def _kind(program: Program, index: int) -> InstructionKind | None:
    return program.instructions[index].kind if 0 <= index < len(program.instructions) else None


def describe_rank(rank: int, coord: MeshCoord, program: Program, position: tuple[int, int]) -> str:
    """A rank in words.

    Example: `rank 1 (pipeline stage 0, tensor-parallel rank 0, data-parallel rank 1) in step 4, at
    reduce_grads of layer 2`.
    """
    step, index = position
    instructions = program.instructions
    when = "before its first step" if position == NOT_STARTED else f"in step {step}"
    doing = f", at {instructions[index]}" if 0 <= index < len(instructions) else ""
    where = (
        f"pipeline stage {coord.stage}, tensor-parallel rank {coord.tensor_rank}, "
        f"data-parallel rank {coord.data_rank}"
    )
    return f"rank {rank} ({where}) {when}{doing}"


def _process_state(pid: int) -> str:
    """The kernel's one-letter state of a process; `T` is stopped."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "?"
