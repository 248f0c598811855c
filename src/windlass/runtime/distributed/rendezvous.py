"""Where the ranks of a run meet, how they start from the same checkpoint, and how they part.

The ranks of one host meet in a file that only their user can open. Nothing listens there: a TCP
store would take keys, and list them, for every process that reaches its port. Hosts of a cluster
meet at a TCP store on the first of them. No store holds pickles.
"""

import contextlib
import errno
import json
import os
import shutil
import socket
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore

from windlass.atomic_files import storage_errors
from windlass.errors import RequestError
from windlass.torch_ext import Device

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""How long a rank waits for others before it gives up. The watchdog reports a hang much sooner;
this limit only ends ranks that nobody watches."""

_CONNECT_TIMEOUT = timedelta(minutes=10)
"""How long a store may take to answer for the first time: hosts need not start at once."""

_RESOLVE_SECONDS = 30
"""Time in which the first host's name must be known; a pod's name is known a little after it."""

_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Makes the libraries listen on the loopback only; other addresses can be reached from outside."""


_FLIGHT_RECORDER = {"TORCH_FR_BUFFER_SIZE": "2000"}
"""Makes torch keep the last collectives of this process. Source: torch's tutorial on its flight
recorder, which names this number."""
_FLIGHT_RECORD_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")


_COMMUNICATOR_STREAMS = {
    # One hardware queue for each stream, as far as there are: a stream that shares its queue waits
    # for the streams before it there, and phases in a pipeline may then wait for each other.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    # A communicator of two ranks carries one channel, so there is nothing to warn of.
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
}
"""What CUDA and torch take from the environment only, before the device is first used."""


class HeadAddress(NamedTuple):
    """Where the first host of a cluster keeps the store."""

    host: str
    port: int


StoreAddress = Path | HeadAddress
"""A store's file, if all ranks are on one host, or its host and port."""


class Rendezvous(NamedTuple):
    """Where the ranks of one attempt at a run find each other."""

    address: StoreAddress
    namespace: str
    """Prefix of all keys; another one for each attempt."""
    rank: int
    """Rank of this process."""
    local_rank: int
    """Index of this process among those on its host."""
    world_size: int


class RunStart(NamedTuple):
    """What every rank must know before the first step of an attempt."""

    attempt: int
    checkpoint: str | None
    """Path of the checkpoint that all ranks resume from; None starts a new run."""


def create_store_file(folder: Path) -> Path:
    """The file of a new store, in a new folder that only this user can enter.

    Raises:
        StorageError: the folder cannot be made.
    """
    private = folder / "store"
    with storage_errors(private):
        if private.exists():
            shutil.rmtree(private)
        private.mkdir(mode=0o700, parents=True)
    return private / "keys"


def host_store(address: HeadAddress) -> TCPStore:
    """The store of a cluster, which listens on this address only.

    Raises:
        RequestError: the port is taken, or the address is not one of this host.
    """
    host, port = address
    with contextlib.closing(_bind(host, port)) as listener:
        listener.listen()
        return TCPStore(
            host, port, is_master=True, wait_for_workers=False, timeout=_CONNECT_TIMEOUT,
            master_listen_fd=listener.detach(),
        )  # fmt: skip


def _bind(host: str, port: int) -> socket.socket:
    """A socket bound to one port of this host.

    Raises:
        RequestError: the port is taken, or the address is not one of this host.
    """
    family, kind, protocol, _, address = _resolve(host, port)
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise RequestError(
                f"port {port} of `{host}` is taken by another process; set PORT to a free one, "
                "the same on every host"
            ) from None
        raise RequestError(
            f"this host, NODE_RANK 0, cannot listen on HEAD={host}, port {port}: {error.strerror}; "
            "set HEAD to the name or address of the host with NODE_RANK 0, the same on every host"
        ) from None
    return listener


def _resolve(host: str, port: int) -> tuple[int, int, int, str, tuple[object, ...]]:
    """The first result of getaddrinfo.

    Raises:
        RequestError: the name is unknown.
    """
    end = time.monotonic() + _RESOLVE_SECONDS
    while True:
        try:
            return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        except OSError as error:
            if time.monotonic() > end:
                raise RequestError(
                    f"the first host's name, HEAD={host}, is unknown: {error}"
                ) from None
            time.sleep(1)


def connect_store(address: StoreAddress, namespace: str) -> Store:
    """The store at an address, whose keys all begin with `namespace`.

    Raises:
        DistError: the store does not answer.
    """
    if isinstance(address, Path):
        return PrefixStore(namespace, FileStore(str(address)))
    host, port = address
    return PrefixStore(namespace, TCPStore(host, port, is_master=False, timeout=_CONNECT_TIMEOUT))


def connect_watchdog_store(address: StoreAddress, namespace: str) -> Store:
    """The store of the watchdogs, one a host: the only one of a run needs no other process.

    Raises:
        DistError: the store does not answer.
    """
    return HashStore() if isinstance(address, Path) else connect_store(address, namespace)


def init_process_group(rendezvous: Rendezvous, device: Device) -> None:
    """Joins the ranks of a run; returns when all are there."""
    has_communicators = device.communication_backend != "gloo"
    if has_communicators:
        os.environ |= _COMMUNICATOR_STREAMS
    device.activate()
    _listen_on_loopback(rendezvous.address)
    _set_unless_set(_FLIGHT_RECORDER)
    store = connect_store(rendezvous.address, rendezvous.namespace)
    store.set_timeout(COLLECTIVE_TIMEOUT)
    dist.init_process_group(
        device.communication_backend,
        store=store,
        rank=rendezvous.rank,
        world_size=rendezvous.world_size,
        timeout=COLLECTIVE_TIMEOUT,
        device_id=device.torch_device if has_communicators else None,
    )


def _listen_on_loopback(address: StoreAddress) -> None:
    """Lets gloo and nccl, which take it from the environment only, listen on the loopback.

    Does so if all ranks are on one host, or if a user has put a cluster's store there, for a trial.
    """
    if isinstance(address, Path):
        os.environ |= _LOOPBACK
    elif address.host in ("localhost", "127.0.0.1", "::1"):
        _set_unless_set(_LOOPBACK)


def _set_unless_set(options: Mapping[str, str]) -> None:
    os.environ |= {name: os.environ.get(name, value) for name, value in options.items()}


def write_flight_record(to: Path) -> None:
    """Writes torch's flight record, the last collectives of this process, as JSON, if any."""
    # Torch has no public name for it; nccl's record has a function of its own.
    dumps = (getattr(_distributed_c10d, name, None) for name in _FLIGHT_RECORD_DUMPS)
    for dump in dumps:
        record = dump() if dump is not None else b""
        if record and json.loads(record).get("entries"):
            to.write_bytes(record)
            return


def broadcast_start(start: RunStart | None, device: Device) -> RunStart:
    """The attempt and checkpoint that rank 0 broadcasts to all ranks."""
    text = json.dumps(start).encode() if start else b""
    length = torch.tensor(len(text), device=device.torch_device)
    dist.broadcast(length, 0)
    content = torch.zeros(int(length), dtype=torch.uint8, device=device.torch_device)
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
