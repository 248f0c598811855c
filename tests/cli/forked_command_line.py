"""Command lines in processes of their own, forked from one in which all is imported already.

Starting such a process takes a tenth of a second, where one that imports torch takes four.
"""

import json
import os
import resource
import select
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forked_runs import fork_runs

_IMPORTED = (
    "windlass.cli.commands.train",
    "windlass.training.run",
    "windlass.runtime.train",
    "windlass.runtime.inference.generate",
)
SECONDS = 120.0
"""Time that a command line may take, on a busy machine."""


def run_forked(
    process: subprocess.Popen[str],
    words: tuple[str, ...],
    folder: Path,
    env: Mapping[str, str],
    *,
    more_bytes: int | None = None,
    file_bytes: int | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs a command line, and waits for its end.

    Args:
        process: runs this file; see `forking_process`.
        words: the command line behind `windlass`.
        folder: where it runs.
        env: all of its environment variables.
        more_bytes: memory that it may take beyond what it begins with.
        file_bytes: size of its largest file: a write beyond it fails as on a full disk.
    """
    files = {name: folder / f".{name}" for name in ("stdout", "stderr")}
    job = {"words": words, "folder": str(folder), "env": dict(env)}
    job |= {name: str(path) for name, path in files.items()}
    job |= {"more_bytes": more_bytes, "file_bytes": file_bytes}
    assert process.stdin
    assert process.stdout
    process.stdin.write(f"{json.dumps(job)}\n")
    process.stdin.flush()
    if not select.select([process.stdout], [], [], SECONDS)[0]:
        process.kill()
        process.wait()
        raise TimeoutError(f"`windlass {' '.join(words)}` takes more than {SECONDS:.0f} s")
    key, code = process.stdout.readline().split()
    assert key == "ended"
    texts = [path.read_text(encoding="utf-8") for path in files.values()]
    for path in files.values():
        path.unlink()
    return subprocess.CompletedProcess(words, int(code), *texts)


def _run(job: dict[str, Any]) -> None:
    """Runs a command line in this process, which is its own."""
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["env"])
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(job[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    sys.argv = ["windlass", *job["words"]]
    if (most := job["file_bytes"]) is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    if (more := job["more_bytes"]) is not None:
        limit = data_bytes() + more
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    main()


def data_bytes() -> int:
    """Data segment of this process, as Linux counts it."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    line = next(line for line in status.splitlines() if line.startswith("VmData:"))
    return 1024 * int(line.split()[1])


if __name__ == "__main__":
    from importlib import import_module

    from windlass.cli.main import main

    for module in _IMPORTED:
        import_module(module)
    fork_runs(_run, announced=False)
