"""Clusters of published runs: their machine, network and software stack, found from a row."""

import re
import tomllib
from collections.abc import Mapping
from functools import cache, lru_cache
from importlib.resources import files
from math import ceil
from typing import Literal

from pydantic import Field

from windlass.document import Document
from windlass.hardware import load_machine
from windlass.schema import Machine
from windlass.units import BytesPerSecond
from windlass.validation.csv_table import TableRow


class Cluster(Document):
    """Where and with which software published runs ran."""

    name: str
    match: dict[str, str] = Field(default_factory=dict)
    """Column -> regular expression that its cell must contain."""
    stack: str
    inner: BytesPerSecond | None = None
    """Bytes/s of a device to others of its host; None means the machine's number."""
    network: BytesPerSecond | None = None
    """Bytes/s that rings reach of one network card in one direction; None means the machine's
    number."""
    crowding: float | None = None
    """As `Link.crowding`, of the network; None means the machine's number."""
    stragglers: float | None = None
    """As `Machine.stragglers`; None means the machine's number."""
    old_software_share: float = 0.0
    """Share by which steps took longer before a software update."""
    deviation: float | None = None
    """Standard deviation of log(measured / predicted) of step time; None means the stack's."""
    memory_deviation: float | None = None
    """The same of peak memory."""
    fitted_to: str = ""
    """Rows that constants were fitted to, in words; empty if to none."""
    rows: tuple[str, ...] = ()
    """Keys of these rows."""
    shared_by: int | None = None
    """Devices that share one card; None means the machine's number."""
    small_host_network: BytesPerSecond | None = None
    """Bytes/s of the only card of a host with an unusual number of devices."""
    filled: float = 1.0
    """Share of each sequence that is computed; the rest is padding that the software leaves out."""
    old_software: str | None = None
    """Pattern in a row's notes that recognizes runs from before a software update."""
    microbatch_split: Literal["fastest", "stages"] = "fastest"
    """How a replica's batch is split if a row does not state it: the fastest way that fits, or as
    many micro-batches as pipeline stages."""
    overlaps: bool = False
    """Whether collectives inside passes run beside products as far as the stack can; else they do
    where a row's notes say so."""
    records: bool = False
    """Whether steps were recorded and replayed (CUDA graphs), so that no host launched kernels."""
    streams: bool = False
    """Whether weights, gradients and optimizer state lie outside the device and stream through
    it."""
    about: str

    def machine(self, family: str, devices: int, per_host: float | None = None) -> Machine:
        """The machine of a run.

        Args:
            per_host: devices of each host; None means the family's number.
        """
        machine = _machine(family, devices, None if per_host is None else round(per_host))
        if not machine.links:
            return machine
        inner, *outer = machine.links
        unusual = per_host is not None and self.small_host_network is not None
        network = self.small_host_network if unusual else self.network
        inner = inner.model_copy(update={"rate": self.inner or inner.rate})
        changed = {"rate": network, "shared_by": self.shared_by, "crowding": self.crowding}
        if unusual:
            changed["shared_by"] = machine.devices_per_host
        changed = {name: value for name, value in changed.items() if value is not None}
        links = (inner, *(link.model_copy(update=changed) for link in outer))
        stragglers = machine.stragglers if self.stragglers is None else self.stragglers
        return machine.model_copy(update={"links": links, "stragglers": stragglers})


@lru_cache(maxsize=1024)
def _machine(family: str, devices: int, per_host: int | None) -> Machine:
    usual = load_machine(family)
    each = per_host or usual.devices_per_host
    machine = load_machine(f"{family}:{ceil(devices / usual.devices_per_host)}")
    if each == usual.devices_per_host:
        return machine
    inner, *outer = machine.links
    links = (inner.model_copy(update={"joins": each}), *outer)
    return machine.model_copy(
        update={"devices_per_host": each, "hosts": ceil(devices / each), "links": links}
    )


@cache
def _tables(name: str) -> Mapping[str, Mapping[str, str]]:
    text = files("windlass.validation").joinpath(name).read_text(encoding="utf-8")
    return tomllib.loads(text)


@cache
def clusters() -> tuple[Cluster, ...]:
    """All clusters, in the order in which rows are matched with them; the last matches any row."""
    fitted = _tables("fitted_clusters.toml")
    return tuple(
        Cluster.model_validate({"name": name, **table, **fitted.get(name, {})})  # type: ignore[dict-item]
        for name, table in _tables("clusters.toml")["clusters"].items()
    )


def find_cluster(row: TableRow) -> Cluster:
    """The first cluster whose patterns a row matches."""
    return next(
        cluster
        for cluster in clusters()
        if all(
            re.search(pattern, row.peek(name), re.IGNORECASE)
            for name, pattern in cluster.match.items()
        )
    )


def find_host_family(row: TableRow) -> str | None:
    """The host family of a row's device; None if none is known."""
    device = row.text("device")
    families = _tables("clusters.toml")["devices"].items()
    return next(
        (name for pattern, name in families if re.search(pattern, device, re.IGNORECASE)), None
    )
