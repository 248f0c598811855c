"""Catalogue: machines by name, each a TOML file beside this one, or a file of one's own."""

from pathlib import Path

from windlass.errors import MachineError, did_you_mean
from windlass.spec.machine import Machine

_FOLDER = Path(__file__).parent


def names() -> tuple[str, ...]:
    """The machines that can be named, in order."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


def find(name: str) -> Machine:
    """The machine of that name, or of a file of one's own, `cluster.toml`.

    Raises:
        MachineError: there is none.
        RequestError: the file cannot be read.
        Faults: all that is wrong in it.
    """
    if name.endswith(".toml"):
        return Machine.load(Path(name))
    if name not in names():
        raise MachineError(
            f"unknown machine `{name}`{did_you_mean(name, [*names(), 'here'])}; "
            "`windlass machines` lists them, and `FILE.toml` is one of your own"
        )
    return Machine.load(_FOLDER / f"{name}.toml")
