"""`windlass` and `python -m windlass`: the command line.

Importing what a command needs takes longer than it takes to press Ctrl-C. An exception in the
middle of an import shows a trace, or is lost in a module that catches it, so until the command
begins a stop signal ends the process in the signal's handler.
"""

import os
import signal
from types import FrameType

from windlass.errors import RunInterrupted
from windlass.stop_signals import STOP_SIGNALS, interrupt

_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)


def main() -> None:
    """Runs the command line of this process."""
    # Where the shell has a signal ignored, as behind `nohup`, it stays so.
    obeyed = [number for number in STOP_SIGNALS if signal.getsignal(number) in _DEFAULTS]
    for number in obeyed:
        signal.signal(number, _end)
    from windlass.cli.main import main as run

    run(on_loaded=lambda: [signal.signal(number, interrupt) for number in obeyed])


def _end(number: int, frame: FrameType | None) -> None:
    """Ends this process, which has nothing to tidy up yet."""
    del number, frame
    os.write(2, b"windlass: interrupted\n")
    os._exit(RunInterrupted.exit_code)


if __name__ == "__main__":
    main()
