"""Software stacks and devices of published runs, recognized by the content of a row."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Literal

from windlass.validation.csv_table import TableRow
from windlass.validation.published_run import PublishedDevice

FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownDevice:
    """A device, the pattern that recognizes it and the source of its numbers."""

    name: str
    match: str
    source: str
    device: PublishedDevice

    @property
    def law(self) -> str:
        """Name of the law that applies to it."""
        return self.device.law


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftwareStack:
    """Software on a cluster, with the constants that it fixes."""

    name: str
    law: str
    about: str
    match: Mapping[str, str]
    """Column -> regular expression that its cell must contain."""
    similar_to: str | None = None
    """Stack whose constants are used if none were fitted, and from which a fit starts."""
    fixed_constants: Mapping[str, float] = field(default_factory=dict)
    """Constants that this software determines; they are never fitted."""
    old_software: str | None = None
    """Pattern in a row's notes that recognizes runs from before a software update; None if there
    was no update."""
    other_clusters: bool = False
    """Whether its rows come from other clusters than the rows that its constants were fitted to."""
    microbatch_split: Literal["fastest", "stages"] = "fastest"
    """How a replica's batch is split if a row does not state it: the fastest way that fits, or as
    many micro-batches as pipeline stages."""
    network_rate: float | None = None
    """Bytes/s of all network cards of a host; None means the device's number."""
    network_cards: float | None = None
    """Network cards of a host; None means the device's number."""
    small_host_network_rate: float | None = None
    """Bytes/s of all network cards of a host with an unusual number of devices; None means the same
    as in a usual host."""

    def device_in_cluster(
        self, device: PublishedDevice, per_host: float | None = None
    ) -> PublishedDevice:
        """The device with the network of this cluster.

        Args:
            device: the device with its usual host.
            per_host: devices in each host; None means the usual number.
        """
        network_rate = device.network_rate if self.network_rate is None else self.network_rate
        network_cards = device.network_cards if self.network_cards is None else self.network_cards
        if per_host in {None, device.per_host} or self.small_host_network_rate is None:
            return replace(device, network_rate=network_rate, network_cards=network_cards)
        return replace(
            device,
            network_rate=self.small_host_network_rate,
            network_cards=1.0,
            per_host=per_host,
        )

    def matches(self, row: TableRow) -> bool:
        """Whether the row matches all patterns."""
        return all(
            re.search(pattern, row.text(name), re.IGNORECASE)
            for name, pattern in self.match.items()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StackCatalog:
    """All known devices and stacks, in the order in which rows are matched with them."""

    devices: tuple[KnownDevice, ...]
    stacks: tuple[SoftwareStack, ...]

    def match_device(self, row: TableRow) -> KnownDevice | None:
        """The first device whose pattern the row matches; None if there is none."""
        name = row.text("device")
        return next(
            (device for device in self.devices if re.search(device.match, name, re.IGNORECASE)),
            None,
        )

    def match_stack(self, row: TableRow, law: str) -> SoftwareStack:
        """The first stack of that law that matches the row; the last stack matches any row."""
        return next(stack for stack in self.stacks if stack.law == law and stack.matches(row))

    def device(self, name: str) -> PublishedDevice:
        """The device of that name."""
        return next(entry.device for entry in self.devices if entry.name == name)

    def stack(self, name: str) -> SoftwareStack:
        """The stack of that name."""
        return next(stack for stack in self.stacks if stack.name == name)


@cache
def stack_catalog() -> StackCatalog:
    """The devices and stacks of `devices.toml` and `stacks.toml`."""
    devices = tomllib.loads((FOLDER / "devices.toml").read_text(encoding="utf-8"))
    stacks = tomllib.loads((FOLDER / "stacks.toml").read_text(encoding="utf-8"))
    return StackCatalog(
        devices=tuple(_device(name, table) for name, table in devices.items()),
        stacks=tuple(
            SoftwareStack(name=name, **{"match": {}, **table}) for name, table in stacks.items()
        ),
    )


def _device(name: str, table: dict[str, object]) -> KnownDevice:
    match, source = str(table.pop("match")), str(table.pop("source"))
    return KnownDevice(name=name, match=match, source=source, device=PublishedDevice(**table))  # type: ignore[arg-type]
