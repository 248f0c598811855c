"""Measures all equal devices of this host at once, and what joins them."""

import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from windlass.child_processes import module_command
from windlass.errors import MachineError
from windlass.hardware.probe.device_rank import DeviceFindings, RingTime, ring_sizes
from windlass.schema import Link
from windlass.torch_ext import device_for

_RANK = "windlass.hardware.probe.device_rank"
_LIMIT_SECONDS = 180.0
_POLL_SECONDS = 0.05
_SAME_FABRIC = 1.25
"""How much faster a smaller ring may be that runs over the same links as a larger one."""
_LEAST_LATENCY = 1e-7


@dataclass(frozen=True, slots=True, kw_only=True)
class HostDevices:
    """All devices of one kind of this host."""

    slowest: int
    """Index of the device that was slowest in the speed check."""
    spread: float
    """How much longer that one took than the fastest, as a share."""
    settled_share: float
    """Rate of products under a load of seconds over that of the first ones, where it is least."""
    free_bytes: int
    """Memory that tensors can fill, where it is least."""
    links: tuple[Link, ...]
    """Innermost first; the last joins all devices. A single device has none."""


def measure_host_devices(kind: str, count: int) -> HostDevices:
    """What `count` devices of a kind do when all compute and communicate at once.

    Args:
        count: number of devices, from index 0 on; several of a CPU share its cores.

    Raises:
        MachineError: a device failed, or did not answer; the message names it.
    """
    with tempfile.TemporaryDirectory(prefix="windlass-probe-") as folder:
        _run_ranks(Path(folder), kind, count)
        found = [DeviceFindings.load(Path(folder) / f"{rank}.json") for rank in range(count)]
    seconds = [each.check_seconds for each in found]
    return HostDevices(
        slowest=seconds.index(max(seconds)),
        spread=max(seconds) / min(seconds) - 1,
        settled_share=min(each.settled_share for each in found),
        free_bytes=min(each.free_bytes for each in found),
        links=ring_links([ring for each in found for ring in each.rings], count),
    )


def ring_links(rings: Sequence[RingTime], count: int) -> tuple[Link, ...]:
    """The links that rings of all sizes show, innermost first.

    A ring that is hardly faster than the next larger one runs over the same links.

    Args:
        rings: times of exchanges, of which the slowest group's counts.
    """
    links: list[Link] = []
    for ranks in reversed(ring_sizes(count)):
        latency, rate = _latency_and_rate([ring for ring in rings if ring.ranks == ranks])
        if not links or rate > _SAME_FABRIC * links[0].rate:
            name = f"ring-{ranks}"
            links.insert(0, Link(name=name, joins=ranks, latency=latency, rate=rate, shared_by=1))
    return tuple(links)


def _latency_and_rate(rings: Sequence[RingTime]) -> tuple[float, float]:
    """The a and w of `hops a + bytes / w` that fit best: least squares of relative errors."""
    slowest: dict[tuple[int, float], float] = {}
    for ring in rings:
        key = ring.hops, ring.sent_bytes
        slowest[key] = max(slowest.get(key, 0.0), ring.seconds)
    rows = [(hops / spent, sent / spent) for (hops, sent), spent in slowest.items()]
    aa, ab, bb = (sum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = sum(row[0] for row in rows), sum(row[1] for row in rows)
    determinant = aa * bb - ab * ab
    latency = max(_LEAST_LATENCY, (a * bb - b * ab) / determinant)
    per_byte = (b * aa - a * ab) / determinant
    if per_byte <= 0:  # latency hides the rate: the largest exchange bounds it
        (_, sent), spent = max(slowest.items(), key=lambda item: item[0][1])
        per_byte = spent / sent
    return latency, 1 / per_byte


def _run_ranks(folder: Path, kind: str, count: int) -> None:
    """Runs the process of each device until all have ended."""
    errors = [(folder / f"{rank}.err").open("wb") for rank in range(count)]
    processes = [
        subprocess.Popen(  # noqa: S603  our own words, no shell
            module_command(_RANK, str(folder), kind, str(rank), str(count)),
            stdout=subprocess.DEVNULL,
            stderr=errors[rank],
        )
        for rank in range(count)
    ]
    try:
        deadline = time.monotonic() + _LIMIT_SECONDS
        while any(process.poll() is None for process in processes):
            failed = [rank for rank, process in enumerate(processes) if process.poll()]
            if failed or time.monotonic() > deadline:
                running = [rank for rank, each in enumerate(processes) if each.poll() is None]
                raise _device_error(folder, kind, count, failed or running)
            time.sleep(_POLL_SECONDS)
    finally:
        for process, error in zip(processes, errors, strict=True):
            process.kill()
            process.wait()
            error.close()
    if failed := [rank for rank, process in enumerate(processes) if process.returncode]:
        raise _device_error(folder, kind, count, failed)


def _device_error(folder: Path, kind: str, count: int, ranks: Sequence[int]) -> MachineError:
    """The error of the device that failed first, with its process's last words."""
    rank = min(ranks, key=lambda each: (folder / f"{each}.err").stat().st_mtime)
    lines = (folder / f"{rank}.err").read_text(errors="replace").strip().splitlines()
    reason = lines[-1] if lines else f"it did not answer within {_LIMIT_SECONDS:.0f} s"
    message = f"device {kind}:{rank} of {count} cannot be measured: {reason}"
    visible = device_for(f"{kind}:0").visible_indices()
    indices = tuple(range(count)) if visible is None else visible
    if kind != "cuda" or len(indices) != count or count == 1:
        return MachineError(message)
    others = ",".join(str(index) for index in indices if index != indices[rank])
    return MachineError(f"{message}; train on the others by `CUDA_VISIBLE_DEVICES={others}`")
