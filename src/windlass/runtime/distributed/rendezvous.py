"""How the ranks of a run meet, start from the same checkpoint, and part.

A run on one host meets at a port that its launcher chose; a run on a cluster meets where torch's
launcher says.
"""

import json
import os
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""How long a rank waits for others before it gives up. The watchdog reports a hang much sooner;
this limit only ends ranks that nobody watches."""

LOOPBACK = "127.0.0.1"


class Rendezvous(NamedTuple):
    """Where the ranks of a run on one host find each other."""

    host: str
    port: int
    rank: int
    """Rank of this process."""
    world_size: int


class RunStart(NamedTuple):
    """What every rank must know before the first step of an attempt."""

    attempt: int
    checkpoint: str | None
    """Path of the checkpoint that all ranks resume from; None starts a new run."""


def init_local_process_group(rendezvous: Rendezvous, device_type: str) -> None:
    """Joins the ranks of this host; returns when all are there.

    The store already listens, in the process that chose the port.

    Args:
        rendezvous: host, port, rank and world size.
        device_type: torch's name for the type of this process's device: `cpu` or `cuda`.
    """
    if rendezvous.host == LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = TCPStore(rendezvous.host, rendezvous.port, rendezvous.world_size, is_master=False)
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        store=store,
        rank=rendezvous.rank,
        world_size=rendezvous.world_size,
        timeout=COLLECTIVE_TIMEOUT,
    )


def init_elastic_process_group(
    rank: int, world_size: int, device_type: str, *, local_rank: int, host: str
) -> None:
    """Joins the ranks that torch's launcher started; returns when all are there.

    Args:
        rank: rank of this process.
        world_size: number of ranks.
        device_type: torch's name for the type of this process's device: `cpu` or `cuda`.
        local_rank: index of this process among those on its host.
        host: name or address of the host where ranks meet.
    """
    if device_type == "cuda":
        torch.cuda.set_device(local_rank)
    if host in (LOOPBACK, "localhost"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # The environment also says who keeps the store and how often all ranks were restarted.
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        init_method="env://",
        rank=rank,
        world_size=world_size,
        timeout=COLLECTIVE_TIMEOUT,
    )


def broadcast_start(start: RunStart | None, device: torch.device) -> RunStart:
    """The attempt and checkpoint that rank 0 broadcasts to all ranks.

    Args:
        start: the value on rank 0; None on every other rank.
        device: device of the tensors that ranks exchange.
    """
    text = json.dumps(start).encode() if start else b""
    length = torch.tensor(len(text), device=device)
    dist.broadcast(length, 0)
    content = torch.zeros(int(length), dtype=torch.uint8, device=device)
    if start:
        content.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    dist.broadcast(content, 0)
    return RunStart(*json.loads(bytes(content.tolist())))


def destroy_process_group() -> None:
    """Leaves the process group; does nothing if there is none."""
    if dist.is_initialized():
        dist.destroy_process_group()


def is_peer_lost(error: BaseException) -> bool:
    """Whether an error only says that another rank is gone, not what went wrong.

    torch's store and nccl raise errors of their own types; gloo raises plain ones that name their
    source.
    """
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and "gloo/transport" in str(error)
    )
