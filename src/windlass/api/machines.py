"""Machines: all that can be named in a request."""

from windlass.api.plan import HERE
from windlass.atomic_files import cache_folder
from windlass.hardware import catalog as catalogue
from windlass.hardware.local_machine import load_here
from windlass.schema.machine import Machine


def machines() -> tuple[tuple[str, Machine], ...]:
    """What to write, and the machine: this one if it has been measured, families, devices.

    `NAME:N` is N hosts of a family; the machine beside it has as many as it can have.

    Raises:
        Faults: a file of the catalogue cannot be read.
    """
    here = load_here(cache_folder())
    found = [] if here is None else [(HERE, here)]
    for family in catalogue.families():
        found.append((f"{family.name}:N", catalogue.find(f"{family.name}:{family.most_hosts}")))
        found += [(size, catalogue.find(size)) for size in family.named]
    found += [(name, catalogue.find(name)) for name in catalogue.devices()]
    return tuple(found)
