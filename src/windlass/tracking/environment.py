"""The environment of a run: code version, packages, processor; collected without torch."""

import os
import platform
import shutil
import socket
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from windlass.schema import Environment

_GIT_SECONDS = 10.0


def collect_environment(command: Sequence[str], *, threads: int | None = None) -> Environment:
    """The environment of this process.

    Args:
        command: the command line of this process, word by word.
        threads: compute threads; None means all that the system lets this process use.
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
    if git is None or _run_git(git, file.parent, "ls-files", "--error-unmatch", file.name) is None:
        return None, False
    commit = _run_git(git, file.parent, "rev-parse", "HEAD")
    changes = _run_git(git, file.parent, "status", "--porcelain", "--untracked-files=no")
    return commit, bool(changes)


def installed_packages() -> dict[str, str]:
    """Versions of all installed packages by name, sorted."""
    versions = {d.metadata["Name"]: d.version for d in metadata.distributions()}
    return dict(sorted((name.lower(), version) for name, version in versions.items() if name))


def processor_name() -> str:
    """The processor's model name as the operating system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _run_git(git: str, folder: Path, *arguments: str) -> str | None:
    """Output of one git command; None if git fails or times out."""
    try:
        answer = subprocess.run(  # noqa: S603  a list of our own words, no shell
            [git, "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
