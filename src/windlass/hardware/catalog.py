"""Catalogue: machines by name, each from TOML files beside this one, or a file of one's own.

`a100-80gb` is one device. `dgx-a100-80gb` is a host of eight, and `dgx-a100-80gb:16` sixteen hosts.
`ipu-pod256` is a name for a number of hosts: 64 of `ipu-m2000`.
"""

from pathlib import Path

from windlass.errors import MachineError, did_you_mean
from windlass.hardware.host_family import HostFamily
from windlass.schema.machine import Machine

_FOLDER = Path(__file__).parent / "devices"
_FAMILIES = Path(__file__).parent / "hosts"


def machine_names() -> tuple[str, ...]:
    """The machines that can be named, in order; families by their smallest."""
    known = host_families()
    sizes = (size for family in known for size in family.named_sizes)
    return tuple(sorted({*device_names(), *sizes, *(family.name for family in known)}))


def device_names() -> tuple[str, ...]:
    """Those of one device, in order."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


def host_families() -> tuple[HostFamily, ...]:
    """Those of one or more hosts, in the order of their names."""
    return tuple(HostFamily.load(path) for path in sorted(_FAMILIES.glob("*.toml")))


def load_machine(name: str) -> Machine:
    """The machine of that name, or of a file of one's own, `cluster.toml`.

    Args:
        name: of a device, a family or a size of one; `NAME:N` is N hosts of a family.

    Raises:
        MachineError: there is none.
        RequestError: the file cannot be read.
        Faults: all that is wrong in it.
    """
    if name.endswith(".toml"):
        return Machine.load(Path(name))
    base, colon, count = name.partition(":")
    if (_FAMILIES / f"{base}.toml").exists():
        family = HostFamily.load(_FAMILIES / f"{base}.toml")
        return _of_family(family, _hosts(name, count, family) if colon else 1, name)
    if base not in machine_names():
        raise MachineError(
            f"unknown machine `{base}`{did_you_mean(base, [*machine_names(), 'here'])}; "
            "`windlass machines` lists them, and `FILE.toml` is one of your own"
        )
    if base in device_names():
        if colon:
            raise MachineError(f"`{name}`: `{base}` is one device; {_hosts_of(base)}")
        return Machine.load(_FOLDER / f"{base}.toml")
    family = next(family for family in host_families() if base in family.named_sizes)
    if colon:
        raise MachineError(
            f"`{name}`: `{base}` is {family.named_sizes[base]} of `{family.name}` already; "
            f"`{family.name}:N` is any number of them"
        )
    return _of_family(family, family.named_sizes[base], name)


def _of_family(family: HostFamily, hosts: int, name: str) -> Machine:
    return family.machine(hosts, Machine.load(_FOLDER / f"{family.device}.toml"), name)


def _hosts(name: str, count: str, family: HostFamily) -> int:
    """The number behind the colon of `name`."""
    if not count.isdecimal() or not 1 <= int(count) <= family.max_hosts:
        raise MachineError(
            f"`{name}`: {count or 'nothing'} is no number of hosts; `{family.name}:N` has 1 to "
            f"{family.max_hosts} of {family.devices_per_host} "
            f"device{'s' if family.devices_per_host > 1 else ''} each"
        )
    return int(count)


def _hosts_of(device: str) -> str:
    """Where there are more of a device."""
    found = [f"`{family.name}:N`" for family in host_families() if family.device == device]
    return f"{' or '.join(found)} is N hosts of them" if found else "leave out what follows it"
