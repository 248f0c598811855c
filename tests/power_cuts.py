"""Tests need no disk that outlives a power cut."""

import os


def without_power_cuts() -> None:
    """Lets this process, and those forked from it, wait for no disk.

    Nothing that a test kills loses what the kernel has, so that only a power cut would tell. A disk
    takes 4 ms to write a file safely, and a run of six steps writes forty.
    """
    os.fsync = lambda _: None
