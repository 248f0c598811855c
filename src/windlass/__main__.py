"""`windlass` and `python -m windlass`: the command line.

Importing what a command needs takes longer than it takes to press Ctrl-C. An exception in the
middle of an import shows a trace, or is lost in a module that catches it, so until the command
begins Ctrl-C ends the process in the signal's handler.
"""

import os
import signal
from types import FrameType

from windlass.errors import RunInterrupted


def main() -> None:
    """Runs the command line of this process."""
    before = signal.getsignal(signal.SIGINT)
    # Where the shell has Ctrl-C ignored, as behind `nohup`, it stays so.
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    from windlass.cli.main import main as run

    run(on_loaded=lambda: signal.signal(signal.SIGINT, before))


def _end(number: int, frame: FrameType | None) -> None:
    """Ends this process, which has nothing to tidy up yet."""
    del number, frame
    os.write(2, b"windlass: interrupted\n")
    os._exit(RunInterrupted.exit_code)


if __name__ == "__main__":
    main()
