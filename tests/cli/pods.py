"""Runs on several devices whose processes a test may reach: to kill, to stop, to starve."""

import contextlib
import os
import resource
import signal
import subprocess
import time
from pathlib import Path

from safetensors.numpy import load_file

from command_line import TINY
from windlass.tracking.load_run import RunRecord, load_run

SILENCE = 3
"""Seconds after which a device counts as hanging: a step takes some hundredths of one."""

WATCHED = (f"train.hang_timeout_seconds={SILENCE}",)
"""For runs in which something is stopped. All others have the minute that users have, which a
machine that others use too may need."""

POD = (*TINY, "train.steps=60", "train.save_every=5", "train.evaluate_every=20")
REPLICAS = (*POD, "parallel.data=2")
STAGES = (*POD, "parallel.pipeline=2")


def device_processes(parent: int) -> dict[int, int]:
    """Process of each device that a process has started, by device."""
    found: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            ours = _parent(int(entry.name)) == parent
            words = (entry / "cmdline").read_bytes().decode().split("\0") if ours else []
            if "--rank" in words:
                found[int(words[words.index("--rank") + 1])] = int(entry.name)
    return found


def wait_for_devices(parent: int, count: int = 2, seconds: float = 60) -> dict[int, int]:
    """The same once all have been started."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if len(found := device_processes(parent)) == count:
            return found
        time.sleep(0.02)
    raise TimeoutError(f"no {count} devices in {seconds} s")


def wait_until_gone(processes: dict[int, int], seconds: float = 10) -> float:
    """Returns after how many seconds none of some processes was left."""
    begun = time.monotonic()
    while any(_alive(process) for process in processes.values()):
        if time.monotonic() > begun + seconds:
            raise TimeoutError(f"of {processes} some are left after {seconds} s")
        time.sleep(0.02)
    return time.monotonic() - begun


def wait_for_step(folder: Path, step: int, seconds: float = 60) -> None:
    """Waits until a run has journalled a step."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if (folder / "id").exists():
            record = load_run(folder)
            if record.steps and record.steps[-1].step >= step:
                return
        time.sleep(0.02)
    raise TimeoutError(f"step {step} did not come in {seconds} s")


def last_step(folder: Path) -> int:
    """The last step that a run has on record; 0 before the first."""
    return max((step.step for step in load_run(folder).steps), default=0) if folder.exists() else 0


def leave_no_room(process: int) -> None:
    """Ends the disk for a running process: a limit on sizes of files takes the same way."""
    resource.prlimit(process, resource.RLIMIT_FSIZE, (4096, 4096))


def leave_no_memory(process: int) -> None:
    """Ends memory for a running process: it gets no more than it has."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE")
    resource.prlimit(process, resource.RLIMIT_AS, (limit, limit))


def weights(folder: Path) -> dict[str, bytes]:
    """Every tensor of the newest checkpoint, as bytes."""
    newest = max((folder / "checkpoints").glob("step-*"))
    return {
        f"{file.name} {name}": tensor.tobytes()
        for file in sorted(newest.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def numbers(record: RunRecord) -> list[tuple[float, ...]]:
    """What must be equal between two runs, bit for bit."""
    return [(s.step, s.loss, s.gradient_norm, s.held_out_loss or 0.0) for s in record.steps]


def ended(process: subprocess.Popen[str]) -> str:
    """What a command line said on its way out."""
    _, news = process.communicate(timeout=60)
    return news


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
