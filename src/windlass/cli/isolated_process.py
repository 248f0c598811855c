"""Apart: runs a module of ours in a process of its own, whose memory is then its own too."""

import subprocess
import sys

from windlass.errors import RunBroken


def run_isolated(module: str, *words: str) -> str:
    """What `python -m module words` prints.

    Raises:
        RunBroken: it ended with an error.
    """
    done = subprocess.run(  # noqa: S603  our own words, no shell
        (sys.executable, "-m", module, *words), capture_output=True, text=True, check=False
    )
    if done.returncode:
        asked = " ".join((module, *words))
        raise RunBroken(f"the run of {asked} ended with {done.stderr.strip()}")
    return done.stdout
