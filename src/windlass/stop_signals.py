"""The signals that ask a command to end, and a run to save: who obeys, and who leaves it to others.

What measures, plans, captures or reads data has nothing to save, so it ends at once.

Ctrl-C goes to the processes of a terminal, and SIGHUP when it closes. A scheduler or systemd sends
SIGTERM to every process of a job. So the process that a user has started obeys, and asks its ranks
to stop with it; a rank that ended by itself would take the step under way with it.
"""

import contextlib
import errno
import os
import signal
import termios
import threading
from collections.abc import Callable, Iterator
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _StopRequest:
    """Whether a stop was requested; signals request one once something asks."""

    def __init__(self) -> None:
        self.requested = threading.Event()
        self.is_asked = False

    def __call__(self) -> bool:
        self.is_asked = True
        return self.requested.is_set()

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Requests a stop, or ends at once what does not ask, and what is asked twice by Ctrl-C."""
        if not self.is_asked or (self.requested.is_set() and number == signal.SIGINT):
            interrupt(number, frame)
        if number == signal.SIGHUP:
            _leave_closed_terminal()
        self.requested.set()


@contextlib.contextmanager
def graceful_stop(*more: signal.Signals) -> Iterator[Callable[[], bool]]:
    """Stop signals request a stop with a save; a second Ctrl-C stops at once.

    A second SIGTERM does not: Slurm sends one at the end of the time that it has given notice of.
    Behind `nohup` SIGHUP stays ignored. Until the yielded function is first called nothing would
    obey the request, and nothing is to be saved: a signal raises `KeyboardInterrupt`.

    Args:
        more: other signals that request a stop.
    """
    stop = _StopRequest()
    obeyed = [*STOP_SIGNALS, *more]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        obeyed.remove(signal.SIGHUP)
    previous = {number: signal.signal(number, stop.handle) for number in obeyed}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def end_until_asked(stop: Callable[[], bool] | None) -> None:
    """Has stop signals end at once what prepares, until `stop` is called again."""
    if isinstance(stop, _StopRequest):
        stop.is_asked = stop.requested.is_set()


def interrupt(number: int, frame: FrameType | None) -> None:
    """Ends a command that has nothing to save.

    Raises:
        KeyboardInterrupt: always.
    """
    del frame
    if number == signal.SIGHUP:
        _leave_closed_terminal()
    raise KeyboardInterrupt


@contextlib.contextmanager
def stop_signals_held() -> Iterator[None]:
    """Has processes that are started in the block keep stop signals until they ignore them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_stop_signals() -> None:
    """Leaves stop signals to the parent of this process, as do the processes that it starts."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _leave_closed_terminal() -> None:
    """Sends output to nobody whose terminal is gone: each write to it would be an error."""
    for number in (1, 2):
        with contextlib.suppress(OSError):
            try:
                termios.tcgetattr(number)
            except termios.error as error:
                if error.args[0] == errno.EIO:
                    os.dup2(os.open(os.devnull, os.O_WRONLY), number)
