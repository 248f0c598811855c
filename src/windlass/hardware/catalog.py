"""Machines by name, from the TOML files beside this module or from a file of the user's own.

`a100-80gb` is one device. `dgx-a100-80gb` is a host of eight, and `dgx-a100-80gb:16` sixteen hosts.
`ipu-pod256` is a name for a number of hosts, 64 of `ipu-m2000`, and `ipu-pod256:4` is four times as
many. `rtx-4090-pc:2` is one host of two devices.
"""

from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field

from windlass.document import Document
from windlass.errors import InputErrors, MachineError, did_you_mean, shorten
from windlass.hardware.machine_check import machine_faults
from windlass.schema import Link, Machine, Source, Tier


class HostFamily(Document):
    """Equal hosts of equal devices, or one host of 1 to n devices; `NAME:N` is N of them."""

    name: str
    device: str
    """Name of the single-device machine that describes each device."""
    devices_per_host: int = Field(ge=1)
    max_hosts: int = Field(ge=1)
    counts: Literal["hosts", "devices"] = "hosts"
    """What N of `NAME:N` counts. `devices`: those of one host, 1 to `devices_per_host`."""
    named_sizes: dict[str, int] = Field(default_factory=dict)
    """Product name -> number of hosts that it has."""
    tiers: tuple[Tier, ...] = ()
    """Offload tiers of a device in these hosts; they replace the tiers of the same name in the
    device's own file."""
    links: tuple[Link, ...]
    """Innermost first, for the largest number of hosts."""
    stragglers: float | None = None
    """As `Machine.stragglers`; None if no runs on such hosts were published."""
    source: str
    date: str
    sources: dict[str, Source]

    @property
    def max_count(self) -> int:
        """The largest N of `NAME:N`."""
        return self.max_hosts if self.counts == "hosts" else self.devices_per_host

    @property
    def default_count(self) -> int:
        """The N of `NAME` alone: one whole host."""
        return 1 if self.counts == "hosts" else self.devices_per_host

    def machine(self, number: int, device: Machine, name: str) -> Machine:
        """The machine with this number of hosts, or of devices in its one host.

        A link joins at most all devices of the machine. A link that joins no more devices than the
        link inside it is left out.

        Args:
            number: number of what the family counts, 1 to `max_count`.
            device: the single-device machine that the field `device` names.
        """
        per_host = self.devices_per_host if self.counts == "hosts" else number
        hosts = number if self.counts == "hosts" else 1
        count = hosts * per_host
        links: list[Link] = []
        for link in self.links:
            joins = min(link.joins, count)
            if joins > (links[-1].joins if links else 1):
                links.append(link.model_copy(update={"joins": joins}))
        device_memory, *offload_tiers = device.device.tiers
        replaced = {tier.name for tier in self.tiers}
        kept = tuple(tier for tier in offload_tiers if tier.name not in replaced)
        tiers = (device_memory, *self.tiers, *kept)
        return device.model_copy(
            update={
                "name": name,
                "hosts": hosts,
                "devices_per_host": per_host,
                "device": device.device.model_copy(update={"tiers": tiers}),
                "links": tuple(links),
                "stragglers": self.stragglers,
                "source": self.source,
                "date": self.date,
                "sources": {**device.sources, **self.sources},
            }
        )


_DEVICES = Path(__file__).parent / "devices"
_HOSTS = Path(__file__).parent / "hosts"
_MAX_DIGITS = 9
"""Digits of a number of hosts that is read at all."""


def machine_names() -> tuple[str, ...]:
    """All names that `load_machine` knows, sorted."""
    families = host_families()
    sizes = (size for family in families for size in family.named_sizes)
    return tuple(sorted({*device_names(), *sizes, *(family.name for family in families)}))


def device_names() -> tuple[str, ...]:
    """Names of the machines that are one device, sorted."""
    return tuple(sorted(path.stem for path in _DEVICES.glob("*.toml")))


@cache
def host_families() -> tuple[HostFamily, ...]:
    """The host families: equal hosts that can be had in any number, sorted by file name."""
    return tuple(HostFamily.load(path) for path in sorted(_HOSTS.glob("*.toml")))


def load_machine(name: str) -> Machine:
    """The machine of that name, or the one that a TOML file of the user describes.

    Args:
        name: a device, a host family or a named size of one; `NAME:N` is N hosts of a family or N
            times a named size, and a name that ends in `.toml` is a path.

    Raises:
        MachineError: no machine has this name.
        RequestError: the file cannot be read.
        InputErrors: everything that is wrong in the file.
    """
    if name.endswith(".toml"):
        return _user_machine(Path(name))
    base, colon, count = name.partition(":")
    if (_HOSTS / f"{base}.toml").exists():
        family = HostFamily.load(_HOSTS / f"{base}.toml")
        number = _count(name, count, family.max_count, family) if colon else family.default_count
        return _family_machine(family, number, name)
    if base not in machine_names():
        raise MachineError(
            f"unknown machine `{shorten(base)}`{did_you_mean(base, [*machine_names(), 'here'])}; "
            "`windlass machines` lists them, and a path `FILE.toml` names a file of your own"
        )
    if base in device_names():
        if colon:
            raise MachineError(f"`{name}`: `{base}` is one device; {_hosts_with(base)}")
        return Machine.load(_DEVICES / f"{base}.toml")
    family = next(family for family in host_families() if base in family.named_sizes)
    hosts = family.named_sizes[base]
    times = _count(name, count, family.max_hosts // hosts, family) if colon else 1
    return _family_machine(family, times * hosts, name)


def _user_machine(path: Path) -> Machine:
    machine = Machine.load(path)
    faults = [f"{path}: {fault}" for fault in machine_faults(machine)]
    if faults:
        raise InputErrors(faults)
    return machine


def _family_machine(family: HostFamily, number: int, name: str) -> Machine:
    return family.machine(number, Machine.load(_DEVICES / f"{family.device}.toml"), name)


def _count(name: str, count: str, most: int, family: HostFamily) -> int:
    """The number after the colon of `name`, 1 to `most`."""
    is_number = count.isdecimal() and len(count) <= _MAX_DIGITS
    if not is_number or not 1 <= int(count) <= most:
        base = name.partition(":")[0]
        hosts = family.named_sizes.get(base, 1) * family.devices_per_host
        each = f" of {hosts} device{'s' if hosts > 1 else ''} each"
        counts = family.counts if base == family.name else "such machines"
        raise MachineError(
            f"`{shorten(name)}`: {shorten(count) or 'nothing'} is not a number of {counts}; "
            f"`{base}:N` has 1 to {most}{each if family.counts == 'hosts' else ''}"
        )
    return int(count)


def _hosts_with(device: str) -> str:
    """Advice that names the families whose hosts have this device."""
    names = [f"`{family.name}:N`" for family in host_families() if family.device == device]
    return f"{' or '.join(names)} is N hosts of them" if names else "leave out the colon"
