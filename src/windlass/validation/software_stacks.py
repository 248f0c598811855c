"""Stacks: which device, cluster and software a row of a table stands for, told by its content."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Literal

from windlass.validation.csv_table import Row
from windlass.validation.runs import Device

FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedDevice:
    """A device, the pattern that finds it and where its numbers come from."""

    name: str
    match: str
    source: str
    device: Device

    @property
    def law(self) -> str:
        """Which law it follows."""
        return self.device.law


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Software on a cluster."""

    name: str
    law: str
    about: str
    match: Mapping[str, str]
    """Column -> pattern that is found there."""
    like: str | None = None
    """Whose constants stand in where none were fitted, or that a fit began from."""
    taken: Mapping[str, float] = field(default_factory=dict)
    """Constants that this software fixes, whatever rows say."""
    earlier: str | None = None
    """Pattern in a row's notes that tells runs of before the software was renewed; None where there
    was one software."""
    strange: bool = False
    """Whether its rows come from other clusters than those that its constants were fitted from."""
    split: Literal["fastest", "stages"] = "fastest"
    """How a replica's batch is split where a row of stages does not say: as is fastest and fits, or
    in as many micro-batches as there are stages."""
    cards: float | None = None
    """Bytes/s of all network cards of a host where the device's number does not hold."""

    ports: float | None = None
    """Network cards of a host where the device's number does not hold."""
    small_cards: float | None = None
    """Bytes/s of all cards of a host that has other than the usual number of devices; None where
    sums are hidden anyway."""

    def at(self, device: Device, per_host: float | None = None) -> Device:
        """The device in this cluster, `per_host` of them in each host; None means as usual."""
        cards = device.cards if self.cards is None else self.cards
        ports = device.ports if self.ports is None else self.ports
        if per_host in {None, device.per_host} or self.small_cards is None:
            return replace(device, cards=cards, ports=ports)
        return replace(device, cards=self.small_cards, ports=1.0, per_host=per_host)

    def holds(self, row: Row) -> bool:
        """Whether all patterns are found."""
        return all(
            re.search(pattern, row.text(name), re.IGNORECASE)
            for name, pattern in self.match.items()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """All devices and stacks, in the order in which they are tried."""

    devices: tuple[NamedDevice, ...]
    stacks: tuple[Stack, ...]

    def device_of(self, row: Row) -> NamedDevice | None:
        """The first device whose pattern is found in the row; None where none is."""
        name = row.text("device")
        return next(
            (known for known in self.devices if re.search(known.match, name, re.IGNORECASE)), None
        )

    def stack_of(self, row: Row, law: str) -> Stack:
        """The first stack of that law whose patterns are all found; the last takes any row."""
        return next(stack for stack in self.stacks if stack.law == law and stack.holds(row))

    def device(self, name: str) -> Device:
        """The device of that name."""
        return next(known.device for known in self.devices if known.name == name)

    def stack(self, name: str) -> Stack:
        """The stack of that name."""
        return next(stack for stack in self.stacks if stack.name == name)


@cache
def catalogue() -> Catalogue:
    """What `devices.toml` and `stacks.toml` say."""
    devices = tomllib.loads((FOLDER / "devices.toml").read_text(encoding="utf-8"))
    stacks = tomllib.loads((FOLDER / "stacks.toml").read_text(encoding="utf-8"))
    return Catalogue(
        devices=tuple(_device(name, table) for name, table in devices.items()),
        stacks=tuple(Stack(name=name, **{"match": {}, **table}) for name, table in stacks.items()),
    )


def _device(name: str, table: dict[str, object]) -> NamedDevice:
    match, source = str(table.pop("match")), str(table.pop("source"))
    return NamedDevice(name=name, match=match, source=source, device=Device(**table))  # type: ignore[arg-type]
