"""The machines that a request can name: the catalogue's, and this one, measured on first use."""

from collections.abc import Callable

from windlass.atomic_files import cache_folder
from windlass.hardware import (
    LOCAL_MACHINE_FILE,
    device_names,
    host_families,
    is_local_machine_changed,
    load_local_machine,
    load_machine,
    save_local_machine,
)
from windlass.schema import Machine

HERE = "here"
"""The name of the machine that this program runs on."""

Progress = Callable[[str, int, int | None], None]
"""Called with a label, the number of items done, and their total (None if it is not known)."""


def machines() -> tuple[tuple[str, Machine], ...]:
    """Name and machine of all that can be named: this machine if measured, families, devices.

    `NAME:N` is N hosts of a family; the machine beside that name has as many as it can have.

    Raises:
        InputErrors: a file of the catalogue cannot be read.
    """
    here = load_local_machine(cache_folder())
    entries = [] if here is None else [(HERE, here)]
    for family in host_families():
        largest = load_machine(f"{family.name}:{family.max_count}")
        entries.append((f"{family.name}:N", largest))
        entries += [(size, load_machine(size)) for size in family.named_sizes]
    entries += [(name, load_machine(name)) for name in device_names()]
    return tuple(entries)


def find_machine(name: str, *, progress: Progress | None = None) -> Machine:
    """A machine of the catalogue, or `here`, which is measured on first use.

    Args:
        name: `here`, a name of the catalogue, or `NAME:N` for N hosts of a family.
        progress: called with how far a measurement is.

    Raises:
        MachineError: the name is unknown, or this machine cannot be measured.
    """
    if name != HERE:
        return load_machine(name)
    folder = cache_folder()
    if progress is not None and is_local_machine_changed(folder):
        progress(f"`{folder / LOCAL_MACHINE_FILE}` was changed: measuring anew", 0, None)
    return load_local_machine(folder) or probe(progress=progress)


def probe(*, progress: Progress | None = None) -> Machine:
    """Measures this machine, and keeps the result for this user.

    Args:
        progress: called with how far the measurement is.

    Raises:
        MachineError: something cannot be measured.
    """
    from windlass.hardware import probe_machine

    machine = probe_machine(progress, cache_folder())
    save_local_machine(cache_folder(), machine)
    return machine
