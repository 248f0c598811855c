"""What a run runs in: code version, packages, processor; collected without torch."""

import os
import platform
import shutil
import socket
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from windlass.schema.run_record import Environment

_GIT_SECONDS = 10.0


def collect_environment(command: Sequence[str], *, threads: int | None = None) -> Environment:
    """The environment of this process.

    Args:
        command: what the user ran, word by word.
        threads: that compute; None: as many as the system lets this process use.
    """
    commit, dirty = code_version(Path(__file__))
    return Environment(
        windlass=metadata.version("windlass"),
        commit=commit,
        dirty=dirty,
        python=platform.python_version(),
        packages=installed_packages(),
        system=platform.platform(),
        host=socket.gethostname(),
        processor=processor_name(),
        threads=threads or len(os.sched_getaffinity(0)),
        command=tuple(command),
    )


def code_version(file: Path) -> tuple[str | None, bool]:
    """Commit of the checkout that tracks `file`, and whether it has uncommitted changes.

    None and False where git is missing or does not track the file: an installed package that merely
    lies below somebody's checkout has no commit of its own.
    """
    git = shutil.which("git")
    if git is None or _ask(git, file.parent, "ls-files", "--error-unmatch", file.name) is None:
        return None, False
    commit = _ask(git, file.parent, "rev-parse", "HEAD")
    changes = _ask(git, file.parent, "status", "--porcelain", "--untracked-files=no")
    return commit, bool(changes)


def installed_packages() -> dict[str, str]:
    """Versions of all installed packages by name, sorted."""
    found = {d.metadata["Name"]: d.version for d in metadata.distributions()}
    return dict(sorted((name.lower(), version) for name, version in found.items() if name))


def processor_name() -> str:
    """The processor's name as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _ask(git: str, folder: Path, *words: str) -> str | None:
    """What git answers; None if it refuses."""
    try:
        answer = subprocess.run(  # noqa: S603  a list of our own words, no shell
            [git, "-C", str(folder), *words],
            capture_output=True,
            text=True,
            timeout=_GIT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
