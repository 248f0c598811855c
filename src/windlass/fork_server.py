"""Processes forked from one that has imported what they need: a fork server, and what it serves.

Importing torch and Windlass takes some seconds of a core. A server imports them once, while the
process that started it still prepares, and then forks as many processes as are asked for. They are
children of the process that asks, as if it had started them itself: it waits for them, and knows
how they end. Each is forked twice: what stands between ends at once, and Linux gives its child to
the nearest process above that adopts (`PR_SET_CHILD_SUBREAPER`).
"""

import contextlib
import ctypes
import json
import os
import socket
import subprocess
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, BinaryIO, NamedTuple

from windlass.stop_signals import stop_signals_held

_PR_SET_CHILD_SUBREAPER = 36
"""Source: linux/prctl.h."""
_MESSAGE_BYTES = 2**20
_STREAMS = 3
_READY_SECONDS = 300.0
"""Time in which a server has imported all, on a busy machine."""
_ADOPTED_SECONDS = 10.0
_READY, _NOT_ADOPTED = b"ready", b"0"


class ForkedProcess:
    """A child of this process that a server has forked; see `subprocess.Popen`."""

    def __init__(self, pid: int, stdin: IO[bytes], stdout: IO[bytes] | None) -> None:
        self.pid = pid
        self.stdin: IO[bytes] | None = stdin
        self.stdout = stdout
        self.returncode: int | None = None

    def wait(self) -> int:
        """Waits for its end; its exit code, or the negated number of the signal."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def send_signal(self, sig: int) -> None:
        """Sends a signal to it."""
        if self.returncode is None:
            os.kill(self.pid, sig)


class ForkRequest(NamedTuple):
    """Describes to a server a process to fork, whose three streams come beside it."""

    words: list[str]
    """Its command line."""
    name: str
    """Its name in `ps` and `top`, of which Linux shows 15 characters."""
    parent: int
    """The process whose child it becomes."""
    cores: list[int]
    """Cores that it may use."""
    environment: dict[str, str]
    """All of its environment variables."""


class ForkServer:
    """A process that imports what others need, and then forks them.

    Args:
        command: starts it; the number of the socket on which it is asked is appended. It calls
            `serve_forks`.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.settimeout(_READY_SECONDS)
        self._is_ready = False
        with theirs, stop_signals_held():
            self._process = subprocess.Popen(  # noqa: S603  our own words, no shell
                (*command, str(theirs.fileno())), pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                # No thread may run in a process that forks: numpy makes some for its products.
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                process_group=0,  # Ctrl-C is for this process
            )  # fmt: skip
        # A run may be made ready, and never begin.
        self._end = weakref.finalize(self, _end, self._process, self._channel)

    def fork(
        self,
        words: Sequence[str],
        *,
        name: str,
        output: int | None,
        errors: BinaryIO,
        environment: Mapping[str, str],
    ) -> ForkedProcess:
        """Forks a process, which becomes a child of this one and leads a process group.

        It may use the cores that this thread may use.

        Args:
            name: its name in `ps` and `top`.
            output: `PIPE`, `DEVNULL`, or None for the output of this process.

        Raises:
            OSError: the server is gone, or does not answer.
        """
        cores = sorted(os.sched_getaffinity(0))
        request = ForkRequest([*words], name, os.getpid(), cores, {**environment})
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            stdin, own_stdin = _pipe(theirs, read=True)
            ours.callback(own_stdin.close)
            stdout, own_stdout = 1, None
            if output == subprocess.PIPE:
                stdout, own_stdout = _pipe(theirs, read=False)
                ours.callback(own_stdout.close)
            elif output == subprocess.DEVNULL:
                stdout = theirs.enter_context(Path(os.devnull).open("wb")).fileno()
            process = self._ask(request, [stdin, stdout, errors.fileno()])
            ours.pop_all()
        return ForkedProcess(process, own_stdin, own_stdout)

    def _ask(self, request: ForkRequest, streams: Sequence[int]) -> int:
        """The process id of a process that the server has forked."""
        try:
            if not self._is_ready:
                self._receive()
                self._is_ready = True
            with _adopting():
                socket.send_fds(self._channel, [json.dumps(request).encode()], streams)
                return int(self._receive())
        except OSError:
            self.close()  # a late answer would be taken for that to the next request
            raise

    def _receive(self) -> bytes:
        answer = self._channel.recv(_MESSAGE_BYTES)
        if answer in (b"", _NOT_ADOPTED):
            raise ConnectionResetError("the process that forks others is gone")
        return answer

    def close(self) -> None:
        """Ends the server; what it has forked goes on."""
        self._end()


def serve_forks(channel: int) -> ForkRequest:
    """Forks processes as they are asked for; returns in each of them, and never in the server.

    The server ends with the process that asks. No thread may run when this is called.
    """
    with socket.socket(fileno=channel) as asked:
        asked.send(_READY)
        while True:
            message, streams, _, _ = socket.recv_fds(asked, _MESSAGE_BYTES, _STREAMS)
            if not message:
                os._exit(0)
            between = os.fork()
            if not between and os.fork():
                os._exit(0)
            if not between:
                request = ForkRequest(*json.loads(message))
                _become(request, streams, asked)
                return request
            os.waitpid(between, 0)
            for stream in streams:
                os.close(stream)


def _become(request: ForkRequest, streams: Sequence[int], asked: socket.socket) -> None:
    """Makes this forked process what the asking one would have started itself."""
    os.setpgid(0, 0)
    deadline = time.monotonic() + _ADOPTED_SECONDS
    while os.getppid() != request.parent:
        if time.monotonic() > deadline:
            asked.send(_NOT_ADOPTED)
            os._exit(1)
        time.sleep(0.001)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.sched_setaffinity(0, request.cores)
    os.environ.clear()
    os.environ.update(request.environment)
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(request.name)
    asked.send(str(os.getpid()).encode())


def _end(process: subprocess.Popen[bytes], channel: socket.socket) -> None:
    channel.close()
    process.kill()
    process.wait()


def _pipe(theirs: contextlib.ExitStack, *, read: bool) -> tuple[int, IO[bytes]]:
    """The end of a new pipe that another process gets, which `theirs` closes, and our own."""
    reader, writer = os.pipe()
    given, own = (reader, writer) if read else (writer, reader)
    theirs.callback(os.close, given)
    return given, os.fdopen(own, "wb" if read else "rb")


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Makes processes below this one its children while their own parents end."""
    control = ctypes.CDLL(None).prctl
    control(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        control(_PR_SET_CHILD_SUBREAPER, 0)
