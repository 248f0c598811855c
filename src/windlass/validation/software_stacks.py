"""Stacks: which device, cluster and software a row of a table stands for, told by its content."""

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
    """A device, the pattern that finds it and where its numbers come from."""

    name: str
    match: str
    source: str
    device: PublishedDevice

    @property
    def law(self) -> str:
        """Which law it follows."""
        return self.device.law


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftwareStack:
    """Software on a cluster."""

    name: str
    law: str
    about: str
    match: Mapping[str, str]
    """Column -> pattern that is found there."""
    like: str | None = None
    """Whose constants stand in where none were fitted, or that a fit began from."""
    fixed_constants: Mapping[str, float] = field(default_factory=dict)
    """Constants that this software fixes, whatever rows say."""
    old_software: str | None = None
    """Pattern in a row's notes that tells runs of before the software was renewed; None where there
    was one software."""
    other_clusters: bool = False
    """Whether its rows come from other clusters than those that its constants were fitted from."""
    microbatch_split: Literal["fastest", "stages"] = "fastest"
    """How a replica's batch is split where a row of stages does not say: as is fastest and fits, or
    in as many micro-batches as there are stages."""
    network_rate: float | None = None
    """Bytes/s of all network cards of a host where the device's number does not hold."""

    network_cards: float | None = None
    """Network cards of a host where the device's number does not hold."""
    small_host_network_rate: float | None = None
    """Bytes/s of all cards of a host that has other than the usual number of devices; None where
    sums are hidden anyway."""

    def device_in_cluster(
        self, device: PublishedDevice, per_host: float | None = None
    ) -> PublishedDevice:
        """The device in this cluster, `per_host` of them in each host; None means as usual."""
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
        """Whether all patterns are found."""
        return all(
            re.search(pattern, row.text(name), re.IGNORECASE)
            for name, pattern in self.match.items()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StackCatalog:
    """All devices and stacks, in the order in which they are tried."""

    devices: tuple[KnownDevice, ...]
    stacks: tuple[SoftwareStack, ...]

    def match_device(self, row: TableRow) -> KnownDevice | None:
        """The first device whose pattern is found in the row; None where none is."""
        name = row.text("device")
        return next(
            (known for known in self.devices if re.search(known.match, name, re.IGNORECASE)), None
        )

    def match_stack(self, row: TableRow, law: str) -> SoftwareStack:
        """The first stack of that law whose patterns are all found; the last takes any row."""
        return next(stack for stack in self.stacks if stack.law == law and stack.matches(row))

    def device(self, name: str) -> PublishedDevice:
        """The device of that name."""
        return next(known.device for known in self.devices if known.name == name)

    def stack(self, name: str) -> SoftwareStack:
        """The stack of that name."""
        return next(stack for stack in self.stacks if stack.name == name)


@cache
def stack_catalog() -> StackCatalog:
    """What `devices.toml` and `stacks.toml` say."""
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
