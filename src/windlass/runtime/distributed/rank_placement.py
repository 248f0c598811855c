"""Which cores each rank of a host computes on, and with how many threads: those near its device.

A thread that feeds a GPU from the other socket of a host sends every launch and every byte of a
copy over the link between the sockets. Where the system says which cores are near which device, a
rank gets those; where it does not, a rank may use all that this process may use.
"""

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from windlass.torch_ext import Device

_NODES = "sys/devices/system/node"
_PCI_DEVICES = "sys/bus/pci/devices"
_DRIVERS = {
    "cuda": ("proc/driver/nvidia/gpus", "sys/bus/pci/drivers/amdgpu"),
    "xpu": ("sys/bus/pci/drivers/xe", "sys/bus/pci/drivers/i915"),
    "hpu": ("sys/bus/pci/drivers/habanalabs",),
}
"""Folders whose entries have the PCI addresses of the devices of a kind. In a container, that of
NVIDIA lists only the devices that the container has."""


class RankPlacement(NamedTuple):
    """Where one rank computes."""

    cores: frozenset[int]
    """Cores that its threads may use; none if the system cannot bind processes."""
    threads: int
    """Number of threads that it computes with."""


def rank_placements(
    device: Device, ranks: int, threads: int, *, root: Path = Path("/")
) -> tuple[RankPlacement, ...]:
    """The placement of each rank of this host, whose device is its index among them.

    Args:
        root: the folder under which `/proc` and `/sys` lie.
    """
    if not hasattr(os, "sched_getaffinity"):
        return (RankPlacement(frozenset(), max(1, threads // ranks)),) * ranks
    allowed = frozenset(os.sched_getaffinity(0))
    nodes = [near for each in _numa_nodes(root) if (near := each & allowed)]
    if device.kind == "cpu":
        cores = [_nodes_of(rank, ranks, nodes) or allowed for rank in range(ranks)]
    else:
        near_devices = _cores_near_devices(device, root)
        cores = [
            (near_devices[rank % len(near_devices)] & allowed if near_devices else None) or allowed
            for rank in range(ranks)
        ]
    sharers = Counter(cores)
    return tuple(
        RankPlacement(each, max(1, threads * len(each) // (len(allowed) * sharers[each])))
        for each in cores
    )


@contextlib.contextmanager
def on_cores(cores: frozenset[int]) -> Iterator[None]:
    """Binds this thread, and so the processes that it starts meanwhile, to these cores.

    A process that is bound from its beginning allocates all its memory near its cores.
    """
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _nodes_of(rank: int, ranks: int, nodes: Sequence[frozenset[int]]) -> frozenset[int]:
    """The cores of one rank's share of the NUMA nodes, which neighbours share if they are few."""
    first = rank * len(nodes) // ranks
    last = max(first + 1, (rank + 1) * len(nodes) // ranks)
    return frozenset().union(*nodes[first:last])


def _numa_nodes(root: Path) -> list[frozenset[int]]:
    """The cores of each NUMA node, in the order of their numbers."""
    folders = sorted((root / _NODES).glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
    return [_read_cores(folder / "cpulist") for folder in folders]


def _cores_near_devices(device: Device, root: Path) -> list[frozenset[int]]:
    """The cores near each visible device; empty if it is not known which PCI device each is."""
    folders = (root / name for name in _DRIVERS.get(device.kind, ()))
    listed = next(filter(None, map(_pci_addresses, folders)), [])
    visible = device.visible_indices()
    if visible is None and device.count() == len(listed):
        visible = tuple(range(len(listed)))
    if not visible or max(visible) >= len(listed):
        return []
    paths = [root / _PCI_DEVICES / listed[index] / "local_cpulist" for index in visible]
    return [_read_cores(path) for path in paths]


def _pci_addresses(folder: Path) -> list[str]:
    """The entries of a driver's folder that are PCI addresses, such as `0000:1b:00.0`."""
    return sorted(path.name for path in folder.glob("*:*:*.*"))


def _read_cores(path: Path) -> frozenset[int]:
    """The cores of a list such as `0-3,8`; none if there is no such file, or it is empty."""
    try:
        ranges = path.read_text().strip().split(",")
    except OSError:
        return frozenset()
    bounds = [each.partition("-") for each in ranges if each]
    return frozenset(
        core for low, _, high in bounds for core in range(int(low), int(high or low) + 1)
    )
