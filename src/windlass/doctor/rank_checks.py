"""Checks of exchanges between processes, one a device: each collective, messages, and rings."""

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from windlass.doctor.findings import Check, Finding, WorkerTask, WrongResultError
from windlass.jobs import Progress
from windlass.models import all_gather, reduce_scatter
from windlass.runtime import Rendezvous, RunStart, broadcast_start, init_process_group
from windlass.schema import RingRate
from windlass.torch_ext import Device
from windlass.units import format_bytes, format_rate, format_seconds

_ELEMENTS = 840
"""Elements of an exchanged tensor; 1 to 8 ranks divide it."""
_RING_BYTES = (2**12, 2**18, 2**22, 2**24)
_ACCELERATOR_RING_BYTES = (*_RING_BYTES, 2**26, 2**28)
_REPEATS = 5
_NETWORK = (
    "see how processes reach each other: `NCCL_DEBUG=INFO` tells what NCCL tries; in containers "
    "raise shared memory (`--shm-size`); look at the topology (`nvidia-smi topo -m`)"
)
STORE_FILE = "store"
"""The file in the task's folder where ranks meet."""


def rank_checks(task: WorkerTask, _: Progress) -> tuple[Check, ...]:
    """The meeting of all ranks, collectives in each type, messages both ways, rings by size."""
    ranks = _Ranks(task)
    if task.first:  # a check failed before, and these are new processes
        ranks.meet()
    exact = (torch.float64,) if ranks.device.has_float64 else ()
    dtypes = (torch.float32, torch.bfloat16, *exact)
    operations: dict[str, Callable[[], Finding]] = {
        "meeting": ranks.meet,
        **{
            f"all-reduce in {str(dtype).removeprefix('torch.')}": partial(ranks.all_reduce, dtype)
            for dtype in dtypes
        },
        "largest value": ranks.all_reduce_max,
        "all-gather": ranks.all_gather,
        "reduce-scatter": ranks.reduce_scatter,
        "broadcast": ranks.broadcast,
        "messages": ranks.messages,
        "groups of neighbours": ranks.subgroups,
        "all-reduce beside a product": ranks.overlap,
        "all-reduce by size": ranks.time_rings,
        "messages by size": ranks.time_messages,
    }
    return tuple(Check(name, run, _NETWORK) for name, run in operations.items())


class _Ranks:
    """One rank, and what it exchanges with all others."""

    def __init__(self, task: WorkerTask) -> None:
        self.device: Device = task.computes_on()
        self._task, self._rank, self._size = task, task.rank, task.ranks

    def meet(self) -> Finding:
        start = time.perf_counter()
        namespace = f"doctor {self._task.first}"
        store = self._task.folder / STORE_FILE
        init_process_group(
            Rendezvous(store, namespace, self._rank, self._rank, self._size), self.device
        )
        self._expect("the sum", self._sum(torch.float32), self._total())
        seconds = format_seconds(time.perf_counter() - start)
        return Finding(f"{self._size} ranks by {dist.get_backend()} in {seconds}")

    def all_reduce(self, dtype: torch.dtype) -> Finding:
        self._expect("the sum", self._sum(dtype), self._total())
        return Finding("exact")

    def all_reduce_max(self) -> Finding:
        x = self._full(self._rank)
        dist.all_reduce(x, dist.ReduceOp.MAX)
        self._expect("the largest", x, self._size - 1)
        return Finding("exact")

    def all_gather(self) -> Finding:
        gathered = self._full(-1)
        part = _ELEMENTS // self._size
        all_gather(gathered[: part * self._size], self._full(self._rank)[:part], group=None)
        for rank, piece in enumerate(gathered[: part * self._size].chunk(self._size)):
            self._expect(f"the part of rank {rank}", piece, rank)
        return Finding("exact")

    def reduce_scatter(self) -> Finding:
        part = _ELEMENTS // self._size
        shard = self._full(-1)[:part]
        reduce_scatter(shard, self._full(self._rank + 1)[: part * self._size], group=None)
        self._expect("the sum", shard, self._total())
        return Finding("exact")

    def broadcast(self) -> Finding:
        start = broadcast_start(RunStart(7, None) if self._rank == 0 else None, self.device)
        if start != RunStart(7, None):
            raise WrongResultError(f"rank 0 sent attempt 7, and attempt {start.attempt} arrived")
        return Finding("exact")

    def messages(self) -> Finding:
        """Each rank to each other, one message at a time, in the same order on all."""
        for source in range(self._size):
            for target in range(self._size):
                if source == target:
                    continue
                if self._rank == source:
                    dist.send(self._full(source + 1), target)
                elif self._rank == target:
                    x = self._full(-1)
                    dist.recv(x, source)
                    self._expect(f"the message of rank {source}", x, source + 1)
        return Finding(f"{self._size * (self._size - 1)} pairs, exact")

    def subgroups(self) -> Finding:
        """All groups of two neighbours, as the groups of a mesh are made: by all, in one order."""
        groups = [[first, first + 1] for first in range(0, self._size - 1, 2)]
        made = [dist.new_group(ranks) for ranks in groups]
        for ranks, group in zip(groups, made, strict=True):
            if self._rank in ranks:
                x = self._full(self._rank + 1)
                dist.all_reduce(x, group=group)
                self._expect("the sum", x, sum(ranks) + 2)
        return Finding(f"{len(groups)} groups of 2, exact")

    def overlap(self) -> Finding:
        x = self._full(self._rank + 1)
        factor = torch.ones(256, 256, device=self.device.torch_device)
        work = dist.all_reduce(x, async_op=True)
        product = factor @ factor
        if work is not None:
            work.wait()
        self._expect("the sum", x, self._total())
        self._expect("the product", product, 256)
        return Finding("exact")

    def time_rings(self) -> Finding:
        share = 2 * (self._size - 1) / self._size
        rings = []
        for nbytes in self._sizes():
            x = torch.ones(nbytes // 4, device=self.device.torch_device)
            seconds = self._seconds(partial(dist.all_reduce, x))
            rings.append(
                RingRate(
                    operation="all-reduce", nbytes=nbytes, seconds=seconds,
                    rate=share * nbytes / seconds,
                )
            )  # fmt: skip
        return Finding(_describe(rings), rings=tuple(rings))

    def time_messages(self) -> Finding:
        """From rank 0 to rank 1."""
        rings = []
        for nbytes in self._sizes():
            x = torch.ones(nbytes // 4, device=self.device.torch_device)
            seconds = self._seconds(partial(self._message, x))
            rings.append(
                RingRate(operation="message", nbytes=nbytes, seconds=seconds, rate=nbytes / seconds)
            )
        return Finding(_describe(rings), rings=tuple(rings))

    def _message(self, x: Tensor) -> None:
        if self._rank == 0:
            dist.send(x, 1)
        elif self._rank == 1:
            dist.recv(x, 0)

    def _sizes(self) -> tuple[int, ...]:
        return _ACCELERATOR_RING_BYTES if self.device.is_asynchronous else _RING_BYTES

    def _seconds(self, work: Callable[[], object]) -> float:
        """The shortest time of some calls, which the slowest rank determines."""
        shortest = float("inf")
        for _ in range(_REPEATS):
            dist.barrier()
            self.device.synchronize()
            start = time.perf_counter()
            work()
            self.device.synchronize()
            shortest = min(shortest, time.perf_counter() - start)
        slowest = torch.tensor(shortest, dtype=torch.float32, device=self.device.torch_device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest)

    def _sum(self, dtype: torch.dtype) -> Tensor:
        x = self._full(self._rank + 1, dtype)
        dist.all_reduce(x)
        return x

    def _total(self) -> int:
        return self._size * (self._size + 1) // 2

    def _full(self, value: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((_ELEMENTS,), value, dtype=dtype, device=self.device.torch_device)

    def _expect(self, name: str, result: Tensor, value: int) -> None:
        wrong = int((result != value).sum())
        if wrong:
            raise WrongResultError(
                f"{name} on rank {self._rank} is wrong in {wrong} of {result.numel()} elements"
            )


def _describe(rings: list[RingRate]) -> str:
    return ", ".join(f"{format_rate(ring.rate)} at {format_bytes(ring.nbytes)}" for ring in rings)
