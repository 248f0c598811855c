"""Processes that Windlass starts itself: the command of one, and the children of this process."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO, BinaryIO, Protocol

from windlass.fork_server import ForkServer
from windlass.stop_signals import stop_signals_held


def module_command(module: str, *words: str) -> list[str]:
    """The command that runs a module of Windlass in a process of its own.

    `-P` keeps the current folder from Python's search path. A file there that is named like one of
    Python's own modules, such as `numbers.py`, would otherwise be imported in its place.

    Args:
        module: the module's full name; that of a package means its `__main__`.
    """
    return [sys.executable, "-P", "-m", module, *words]


class ChildProcess(Protocol):
    """A child of this process, as `subprocess.Popen` describes it."""

    pid: int
    stdin: IO[bytes] | None
    stdout: IO[bytes] | None
    returncode: int | None

    def wait(self) -> int:
        """Waits for its end; its exit code, or the negated number of the signal."""

    def send_signal(self, sig: int) -> None:
        """Sends a signal to it."""


class ChildProcesses:
    """Starts processes of one command, each the leader of a process group.

    They begin with stop signals held back, and are to call `ignore_stop_signals`.

    Args:
        command: their command, but for the words of each.
        server: forks them; without one, or if it is gone, each is started anew.
    """

    def __init__(self, command: Sequence[str], server: ForkServer | None = None) -> None:
        self._command, self._server = command, server

    def start(
        self,
        words: Sequence[str],
        *,
        name: str,
        output: int | None,
        errors: BinaryIO,
        environment: Mapping[str, str],
    ) -> ChildProcess:
        """Starts a process, whose input is a pipe from this one.

        Args:
            name: its name in `ps` and `top` if it is forked.
            output: `PIPE`, `DEVNULL`, or None for the output of this process.
            errors: receives its error stream.
            environment: all of its environment variables.
        """
        if self._server is not None:
            with contextlib.suppress(OSError):
                return self._server.fork(
                    words, name=name, output=output, errors=errors, environment=environment
                )
        # Ctrl-C is for this process, which tells the others. A process group within our session,
        # not a session of its own: the kernel resumes the stopped processes of a group that is
        # orphaned when this process dies.
        with stop_signals_held():
            return subprocess.Popen(  # noqa: S603  our own words, no shell
                (*self._command, *words), stdin=subprocess.PIPE, stdout=output, stderr=errors,
                env=environment, process_group=0,
            )  # fmt: skip


def kill_process_groups(processes: Sequence[ChildProcess]) -> None:
    """Kills processes that each lead a process group, with all that they have started."""
    for process in processes:
        # Nobody has reaped it yet, so its process id cannot have been reused.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.wait()
        if process.stdin:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()


def exit_code(process: ChildProcess) -> int | None:
    """The exit code of a process, as Popen counts it; None while it runs.

    The process is not reaped, so that its process id cannot be reused.
    """
    if process.returncode is not None:
        return process.returncode
    status = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if status is None:
        return None
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
