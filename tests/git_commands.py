"""Runs git in a folder, as a user with a name."""

import subprocess
from pathlib import Path


def git(folder: Path, *words: str) -> str:
    """What a git command writes, without the last line break."""
    name = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    command = ["git", "-C", str(folder), *name, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
