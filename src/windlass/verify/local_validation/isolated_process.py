"""Runs a Windlass module in a process of its own, so that its memory can be measured alone."""

import subprocess

from windlass.child_processes import module_command
from windlass.errors import RunBroken


def run_isolated(module: str, *args: str) -> str:
    """Standard output of `python -m module args`.

    Raises:
        RunBroken: the process ended with an error.
    """
    process = subprocess.run(  # noqa: S603  the arguments are ours, and no shell reads them
        module_command(module, *args), capture_output=True, text=True, check=False
    )
    if process.returncode:
        command = " ".join((module, *args))
        raise RunBroken(f"`{command}` failed: {process.stderr.strip()}")
    return process.stdout
