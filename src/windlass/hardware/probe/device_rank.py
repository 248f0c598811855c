"""One of several equal devices of this host, measured while all others are measured too.

`python -m windlass.hardware.probe.device_rank FOLDER KIND RANK COUNT` writes `RANK.json` into the
folder. Each device has a process of its own, as in a run. So a device that cannot compute is known
by its process, and clocks, power and host are shared as they are in a run.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from windlass.document import Document
from windlass.hardware.probe.speed_check import speed_check_seconds
from windlass.torch_ext import Device, device_for

_TIMEOUT = timedelta(seconds=60)
_LOAD_SIDE, _LOAD_SECONDS = 8192, 4.0
"""Side of the square product that loads an accelerator, and for how long: power and temperature
lower its clocks within seconds."""
_CPU_LOAD_SIDE, _CPU_LOAD_SECONDS = 512, 0.05
_CHECK_SECONDS, _CPU_CHECK_SECONDS = 0.5, 0.01
_FRESH, _SETTLED = 0.1, 0.75
"""Shares of the load until which clocks count as fresh, and after which as settled."""
_SIZES = (4, 2**20, 2**24, 2**28)
"""Bytes of what each rank holds whole."""
_CPU_SIZES = (4, 2**16, 2**20)
_ROUNDS = 3
_REPEATS, _CPU_REPEATS = 20, 3
"""Exchanges that follow each other in one round, as layers' exchanges do in a step."""


class RingTime(Document):
    """Seconds of one exchange among some neighbours, while all others do the same."""

    ranks: int
    hops: int
    """Messages that follow each other."""
    sent_bytes: float
    """Bytes that each rank sends."""
    seconds: float


class DeviceFindings(Document):
    """What the process of one device measured."""

    check_seconds: float
    """Seconds of the speed check after the load."""
    settled_share: float
    """Rate of products once clocks have settled, over that of the first ones; at most 1."""
    free_bytes: int
    """Device memory that tensors can fill."""
    rings: tuple[RingTime, ...]


def ring_sizes(count: int) -> tuple[int, ...]:
    """The sizes of rings that are measured among `count` devices: 2, 4, 8, ... and all."""
    powers = [2**power for power in range(1, count.bit_length()) if 2**power < count]
    return (*powers, count) if count > 1 else ()


def main() -> None:
    """Measures one device and its part in all rings."""
    folder, kind, rank, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    device = device_for(f"{kind}:{rank}")
    device.activate()
    settled = settled_share(device)
    findings = DeviceFindings(
        check_seconds=_check_seconds(device),
        settled_share=settled,
        free_bytes=device.free_memory(),
        rings=tuple(_rings(device, FileStore(str(folder / "store"), count), rank, count)),
    )
    findings.save(folder / f"{rank}.json")


def _check_seconds(device: Device) -> float:
    """Seconds of the speed check, whose parts take so long each that clocks stay settled."""
    budget = _CHECK_SECONDS if device.is_asynchronous else _CPU_CHECK_SECONDS
    return speed_check_seconds(device.torch_device, budget_seconds=budget)


def settled_share(device: Device) -> float:
    """Rate of products once clocks have settled under load, over that of the first ones."""
    on_host = not device.is_asynchronous
    side = _CPU_LOAD_SIDE if on_host else _LOAD_SIDE
    seconds = _CPU_LOAD_SECONDS if on_host else _LOAD_SECONDS
    dtype = torch.bfloat16 if device.has_bfloat16() else torch.float16
    x = torch.randn(side, side, device=device.torch_device, dtype=dtype)
    torch.mm(x, x)  # loads the library
    device.synchronize()
    times: list[tuple[float, float]] = []
    start = time.perf_counter()
    while not times or times[-1][0] < seconds:
        before = time.perf_counter()
        torch.mm(x, x)
        device.synchronize()
        times.append((time.perf_counter() - start, time.perf_counter() - before))
    first = [spent for at, spent in times if at <= _FRESH * seconds] or [times[0][1]]
    last = [spent for at, spent in times if at >= _SETTLED * seconds]
    return min(1.0, statistics.median(first) / statistics.median(last))


def _rings(device: Device, store: FileStore, rank: int, count: int) -> Iterator[RingTime]:
    """The times of all exchanges that this rank takes part in."""
    if count == 1:
        return
    dist.init_process_group(
        device.communication_backend, store=store, rank=rank, world_size=count, timeout=_TIMEOUT,
        device_id=device.torch_device if device.is_asynchronous else None,
    )  # fmt: skip
    for ranks in ring_sizes(count):
        # Every process makes every group, in the same order.
        members = [range(first, first + ranks) for first in range(0, count - ranks + 1, ranks)]
        groups = [dist.new_group(list(each), timeout=_TIMEOUT) for each in members]
        own = next((index for index, each in enumerate(members) if rank in each), None)
        for nbytes in _SIZES if device.is_asynchronous else _CPU_SIZES:
            if own is not None:
                yield from _ring_times(device, groups[own], members[own], rank, nbytes)
            _meet(device)
    dist.destroy_process_group()


def _ring_times(
    device: Device, group: dist.ProcessGroup, members: range, rank: int, nbytes: int
) -> Iterator[RingTime]:
    """Seconds of an all-reduce, an all-gather and a shift to the next rank, each of `nbytes`."""
    ranks = len(members)
    elements = max(1, nbytes // 4 // ranks) * ranks
    whole = torch.zeros(elements, device=device.torch_device)
    other, part = torch.zeros_like(whole), whole[: elements // ranks].clone()
    following = members[(rank - members[0] + 1) % ranks]
    previous = members[(rank - members[0] - 1) % ranks]

    def shift() -> None:
        messages = [
            dist.P2POp(dist.isend, whole, following, group),
            dist.P2POp(dist.irecv, other, previous, group),
        ]
        for work in dist.batch_isend_irecv(messages):
            work.wait()

    exchanges: tuple[tuple[int, float, Callable[[], object]], ...] = (
        (2 * (ranks - 1), 2 * (ranks - 1) / ranks, partial(dist.all_reduce, whole, group=group)),
        (
            ranks - 1,
            (ranks - 1) / ranks,
            partial(dist.all_gather_into_tensor, whole, part, group=group),
        ),
        (1, 1.0, shift),
    )
    for hops, share, exchange in exchanges:
        yield RingTime(
            ranks=ranks, hops=hops, sent_bytes=share * 4 * elements,
            seconds=_seconds(device, exchange),
        )  # fmt: skip


def _seconds(device: Device, exchange: Callable[[], object]) -> float:
    """Seconds of one exchange of several in a row: the median of some rounds, after one more."""
    repeats = _REPEATS if device.is_asynchronous else _CPU_REPEATS
    rounds: list[float] = []
    for _ in range(_ROUNDS + 1):
        device.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            exchange()
        device.synchronize()
        rounds.append((time.perf_counter() - start) / repeats)
    return statistics.median(rounds[1:])


def _meet(device: Device) -> None:
    """Returns when all ranks have come here."""
    dist.all_reduce(torch.zeros(1, device=device.torch_device))
    device.synchronize()


if __name__ == "__main__":
    main()
