"""Runs on several ranks whose processes a test kills, stops or deprives of memory and disk."""

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from safetensors.numpy import load_file

from command_line import TINY
from windlass.tracking.run_reader import RunRecord
from windlass.tracking.series import read_series

HANG_SECONDS = 3
"""Time without progress after which a rank counts as hanging; a step takes some hundredths of a
second."""

SHORT_TIMEOUT = (f"train.hang_timeout_seconds={HANG_SECONDS}",)
"""For runs in which a process is stopped. All others have the default of a minute, which a busy
machine may need."""

RUN = (*TINY, "train.steps=60", "train.save_every=5", "train.evaluate_every=20")
REPLICAS = (*RUN, "parallel.data=2")
STAGES = (*RUN, "parallel.pipeline=2")
CONSTANT = (*STAGES, "train.schedule=constant", "train.warmup=0")
"""Whose steps do not depend on how many there are."""


def rank_processes(parent: int) -> dict[int, int]:
    """The process of each rank that a process has started, by rank."""
    processes: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if _parent(int(entry.name)) == parent:
                processes[int(errors_of(entry).stem)] = int(entry.name)
    return processes


def errors_of(process: Path) -> Path:
    """The file that receives the error stream of a process; that of a rank is `ranks/RANK.err`."""
    return (process / "fd" / "2").readlink()


def wait_for_ranks(parent: int, count: int = 2, seconds: float = 60) -> dict[int, int]:
    """The same, once all of them have been started."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if len(processes := rank_processes(parent)) == count:
            return processes
        time.sleep(0.02)
    raise TimeoutError(f"no {count} ranks in {seconds} s")


def wait_until_gone(processes: dict[int, int], seconds: float = 10) -> float:
    """Waits until some processes have ended, and returns the seconds that it took."""
    start = time.monotonic()
    while any(_alive(process) for process in processes.values()):
        if time.monotonic() > start + seconds:
            raise TimeoutError(f"some of {processes} are left after {seconds} s")
        time.sleep(0.02)
    return time.monotonic() - start


def wait_for_step(folder: Path, step: int, seconds: float = 60) -> None:
    """Waits until a run has a step on record."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if last_step(folder) >= step:
            return
        time.sleep(0.02)
    raise TimeoutError(f"step {step} did not come in {seconds} s")


def last_step(folder: Path) -> int:
    """The last step that a run has on record; 0 before the first."""
    # The whole record takes a hundred times as long to read, time that the run could use.
    losses = read_series(folder).get("loss")
    return 0 if losses is None else int(losses.steps.max(initial=0))


def leave_no_disk(process: int) -> None:
    """Simulates a full disk for a running process by a limit on file sizes, which fails alike."""
    # The files of its layers have more bytes, and what it reports then has fewer.
    resource.prlimit(process, resource.RLIMIT_FSIZE, (1024, 1024))


def leave_no_memory(process: int) -> None:
    """Lets a running process allocate no more memory than it has."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE")
    resource.prlimit(process, resource.RLIMIT_AS, (limit, limit))


def weights(folder: Path) -> dict[str, bytes]:
    """The bytes of every tensor in the newest checkpoint, by file and name."""
    newest = max((folder / "checkpoints").glob("step-*"))
    return {
        f"{file.name} {name}": tensor.tobytes()
        for file in sorted(newest.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def numbers(record: RunRecord) -> list[tuple[float, ...]]:
    """Step, loss, gradient norm and held-out loss of every step, to be compared bit for bit."""
    return [(s.step, s.loss, s.gradient_norm, s.held_out_loss or 0.0) for s in record.steps]


def ended(process: subprocess.Popen[str]) -> str:
    """Waits until a command line has ended, and returns what it wrote to stderr."""
    _, stderr = process.communicate(timeout=60)
    return stderr


def _alive(process: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def _parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def send(process: int, number: signal.Signals) -> bool:
    """Sends a signal to a process; False if it is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)
        return True
    return False


def listeners(processes: list[int]) -> set[tuple[str, int]]:
    """Address and port of every TCP socket on which some processes listen."""
    folders = (Path(f"/proc/{process}/fd") for process in processes)
    sockets = {_target(link) for folder in folders for link in _entries(folder)}
    addresses = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == _LISTENS and f"socket:[{inode}]" in sockets:
                number, port = local.split(":")
                # Words of four bytes, each as this machine writes numbers.
                words = [int(number[at : at + 8], 16) for at in range(0, len(number), 8)]
                packed = b"".join(word.to_bytes(4, sys.byteorder) for word in words)
                addresses.add((socket.inet_ntop(family, packed), int(port, 16)))
    return addresses


_LISTENS = "0A"
"""Source: linux, include/net/tcp_states.h."""


def _entries(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return list(folder.iterdir())
    return []


def _target(link: Path) -> str:
    with contextlib.suppress(OSError):
        return str(link.readlink())
    return ""
