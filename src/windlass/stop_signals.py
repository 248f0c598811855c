"""The signals that ask a run to save and end: who obeys them, and who leaves that to its parent.

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


@contextlib.contextmanager
def graceful_stop(*more: signal.Signals) -> Iterator[Callable[[], bool]]:
    """Stop signals request a stop with a save; a second Ctrl-C stops at once.

    A second SIGTERM does not: Slurm sends one at the end of the time that it has given notice of.
    Behind `nohup` SIGHUP stays ignored.

    Args:
        more: other signals that request a stop.
    """
    requested = threading.Event()

    def request_stop(number: int, frame: FrameType | None) -> None:
        del frame
        if requested.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        if number == signal.SIGHUP:
            _leave_closed_terminal()
        requested.set()

    obeyed = [*STOP_SIGNALS, *more]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        obeyed.remove(signal.SIGHUP)
    previous = {number: signal.signal(number, request_stop) for number in obeyed}
    try:
        yield requested.is_set
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


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
