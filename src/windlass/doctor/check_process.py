"""Starts the processes of a group of checks, and survives whatever becomes of them."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from windlass.child_processes import module_command
from windlass.errors import RunBroken
from windlass.hardware import core_count
from windlass.jobs import Progress
from windlass.schema import CheckGroup, DoctorCheck, DoctorSystem
from windlass.tracking import without_personal_data

_WORKER = "windlass.doctor.check_worker"
_GRACE_SECONDS = 2.0
"""Time in which other ranks tell why one has ended."""
_LONGEST_REASON = 400


class CheckRun(NamedTuple):
    """A group of checks and where they run."""

    group: CheckGroup
    device: str
    """Torch's name of the device, or of the kind of devices of several ranks."""
    ranks: int = 1
    """Processes that run the checks together."""
    devices: int = 1
    """Devices that a plan may take."""
    limit_seconds: float = 180.0
    """Time without any news after which a check has failed."""

    @property
    def label(self) -> str:
        """`cuda:0`, or `8 x cuda` for several ranks."""
        return f"{self.ranks} x {self.device}" if self.ranks > 1 else self.device


def read_system(folder: Path, *, limit_seconds: float = 120.0) -> DoctorSystem:
    """Hardware and software of this machine, from a process that loads torch.

    Raises:
        RunBroken: torch cannot be loaded.
    """
    with contextlib.closing(_Workers([["system"]], folder, threads=None)) as workers:
        while True:
            message = workers.next(limit_seconds)
            if message.kind == "system":
                return DoctorSystem.model_validate(message.value)
            if message.kind == "end":
                raise RunBroken(message.value)


def run_checks(
    run: CheckRun, folder: Path, progress: Progress | None = None
) -> Iterator[DoctorCheck]:
    """Runs the checks of a group, and yields the outcome of each as it ends.

    After a check that failed, new processes go on with the next one.

    Args:
        folder: an empty folder for what they write.
    """
    names: list[str] = []
    done = 0
    while not names or done < len(names):
        attempt = folder / f"{run.group}-{done}"
        attempt.mkdir(parents=True)
        for check in _attempt(run, attempt, done, names, progress):
            yield check
            done += 1
        if not names:
            return


def _attempt(
    run: CheckRun, folder: Path, first: int, names: list[str], progress: Progress | None
) -> Iterator[DoctorCheck]:
    """The outcomes from the first one on, up to one that failed; `names` receives all names."""
    tasks = [
        {
            "group": run.group, "device": run.device, "label": run.label, "rank": rank,
            "ranks": run.ranks, "devices": run.devices, "first": first, "folder": str(folder),
        }
        for rank in range(run.ranks)
    ]  # fmt: skip
    index, start = first, time.monotonic()
    finished: dict[int, list[DoctorCheck]] = {}
    _report(progress, run, names, index)
    with contextlib.closing(
        _Workers([[json.dumps(task)] for task in tasks], folder, threads=run.ranks)
    ) as workers:
        while not names or index < len(names):
            message = workers.next(run.limit_seconds)
            if message.kind == "names":
                names[:] = message.value
                _report(progress, run, names, index)
            elif message.kind == "progress" and progress is not None:
                progress(*message.value)
            elif message.kind == "end":
                name = names[index] if names else "start"
                yield _failed(run, name, message.value, time.monotonic() - start)
                return
            elif message.kind == "result":
                check = DoctorCheck.model_validate(message.value)
                if check.status == "failed":
                    yield check
                    return
                results = finished.setdefault(message.position, [])
                results.append(check)
                if len(results) == run.ranks:
                    # All ranks found the same, but the first one's clock began with the check.
                    yield results[0]
                    index, start = index + 1, time.monotonic()
                    _report(progress, run, names, index)


def _report(progress: Progress | None, run: CheckRun, names: Sequence[str], index: int) -> None:
    if progress is not None:
        progress(f"checking {run.group} on {run.label}", index, len(names) or None)


def _failed(run: CheckRun, name: str, reason: str, seconds: float) -> DoctorCheck:
    """A check whose process ended, or gave no news."""
    return DoctorCheck(
        group=run.group, name=name, device=run.label, status="failed", seconds=seconds,
        detail=reason,
        way_out="see the driver's log (`dmesg`), update torch or the driver, and report it",
    )  # fmt: skip


class _Message(NamedTuple):
    """One line of a worker."""

    kind: str
    """`names`, `progress`, `result`, `system`, or `end` with the reason."""
    value: Any
    """As JSON has it; each kind is validated where it is read."""
    position: int = 0
    """Number of results of this worker before this one."""


class _Workers:
    """Processes that run checks together; closing kills those that still run.

    Args:
        threads: among how many processes the cores are shared; None sets nothing.
    """

    def __init__(
        self, arguments: Sequence[Sequence[str]], folder: Path, *, threads: int | None
    ) -> None:
        self._folder = folder
        self._messages: queue.Queue[_Message] = queue.Queue()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._readers: list[threading.Thread] = []
        share = {}
        if threads is not None and threads > 1:
            share = {"OMP_NUM_THREADS": str(max(1, core_count() // threads))}
        try:
            for rank, each in enumerate(arguments):
                self._start(rank, each, share)
        except BaseException:
            self.close()
            raise

    def _start(self, rank: int, arguments: Sequence[str], share: dict[str, str]) -> None:
        with (self._folder / f"{rank}.err").open("wb") as stderr:
            process = subprocess.Popen(  # noqa: S603  our own words, no shell
                module_command(_WORKER, *arguments),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=os.environ | share,
                # Ctrl-C is for this process, which ends the others.
                process_group=0,
            )
        self._processes.append(process)
        reader = threading.Thread(target=self._read, args=(rank, process), daemon=True)
        reader.start()
        self._readers.append(reader)

    def _read(self, rank: int, process: "subprocess.Popen[bytes]") -> None:
        index = 0
        for line in process.stdout or ():
            with contextlib.suppress(ValueError):
                kind, value = json.loads(line)
                self._messages.put(_Message(kind, value, index))
                index += kind == "result"
        # It is not reaped before `close`, so that its process id cannot be used again.
        state = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        if state is not None and state.si_status:
            self._messages.put(_Message("end", self._reason(rank, state)))

    def next(self, limit_seconds: float) -> _Message:
        """The next line of any worker; `end` with the reason if one ends, or there is no news."""
        try:
            message = self._messages.get(timeout=limit_seconds)
        except queue.Empty:
            return _Message("end", f"it gave no sign of life for {limit_seconds:.0f} s")
        if message.kind == "end":
            # Another rank may know better why this one is gone.
            deadline = time.monotonic() + _GRACE_SECONDS
            with contextlib.suppress(queue.Empty):
                while (left := deadline - time.monotonic()) > 0:
                    later = self._messages.get(timeout=left)
                    if later.kind == "result" and later.value["status"] == "failed":
                        return later
        return message

    def _reason(self, rank: int, state: os.waitid_result) -> str:
        """Why a worker ended, with the last line of its error stream."""
        lines = (self._folder / f"{rank}.err").read_text("utf-8", "replace").strip().splitlines()
        by_signal = state.si_code != os.CLD_EXITED
        code = state.si_status
        name = signal.Signals(code).name if by_signal else f"code {code}"
        text = f"its process ended with {name}" + (f": {lines[-1].strip()}" if lines else "")
        return without_personal_data(text)[:_LONGEST_REASON]

    def close(self) -> None:
        """Kills the processes that still run, with all that they have started."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        for process, reader in zip(self._processes, self._readers, strict=True):
            reader.join()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
