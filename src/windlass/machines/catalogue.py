"""Catalogue: machines by name, each a TOML file beside this one with the source of its numbers."""

from pathlib import Path

from windlass.errors import MachineError, did_you_mean
from windlass.spec.machine import Machine

_FOLDER = Path(__file__).parent


def names() -> tuple[str, ...]:
    """The machines that can be named, in order."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


def find(name: str) -> Machine:
    """The machine of that name.

    Raises:
        MachineError: there is none.
    """
    if name not in names():
        raise MachineError(
            f"unknown machine `{name}`{did_you_mean(name, [*names(), 'here'])}; "
            "`windlass machines` lists them"
        )
    return Machine.load(_FOLDER / f"{name}.toml")
