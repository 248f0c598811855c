"""Measured machines that a user has added: `windlass machines add` keeps them, plans name them."""

from pathlib import Path

from windlass.atomic_files import atomic_write
from windlass.errors import InputErrors, MachineError, RequestError, shorten
from windlass.hardware.catalog import machine_names
from windlass.hardware.machine_check import machine_faults
from windlass.hardware.machine_questions import name_fault
from windlass.schema import DoctorReport, Machine


def user_machine_names(folder: Path) -> tuple[str, ...]:
    """Names of the machines in a user's folder, sorted."""
    return tuple(sorted(path.stem for path in folder.glob("*.toml")))


def load_user_machine(folder: Path, name: str) -> Machine | None:
    """A machine that was added under this name; None if there is none.

    Raises:
        InputErrors: everything that is wrong in its file.
    """
    if name not in user_machine_names(folder):
        return None
    path = folder / f"{name}.toml"
    machine = Machine.load(path)
    _require_faultless(path, machine)
    return machine


def machine_of_report(file: Path, name: str | None = None) -> Machine:
    """The measured machine in a report of `windlass doctor`.

    Args:
        name: name of the machine; None takes the report's.

    Raises:
        RequestError: the file cannot be read, or is another one.
        InputErrors: everything that is wrong in the file or with the name.
        MachineError: the report has no measured rates, or the name is taken by the catalogue.
    """
    report = _read_report(file)
    name = name or report.name
    if fault := name_fault(name):
        raise InputErrors([f"{fault} (`--name`)"])
    if name in (*machine_names(), "here") or name.endswith(".toml"):
        raise MachineError(f"`{name}` names another machine already; choose a name with `--name`")
    if report.machine is None:
        raise MachineError(
            f"`{shorten(str(file))}` holds no measured rates, because the measurement failed "
            "there; its rows of group `machine` say why"
        )
    _require_faultless(file, report.machine)
    return report.machine.model_copy(update={"name": name})


def save_user_machine(folder: Path, machine: Machine, *, replace: bool = False) -> Path:
    """Writes a machine to a user's folder, and returns its path.

    Args:
        folder: the folder; made if it is missing.
        machine: a machine of `machine_of_report`.

    Raises:
        MachineError: another machine has this name.
    """
    path = folder / f"{machine.name}.toml"
    text = machine.to_toml()
    if path.exists() and not replace and path.read_text(encoding="utf-8") != text:
        raise MachineError(
            f"another machine named `{machine.name}` was added before; choose a name with "
            "`--name`, or replace it with `--replace`"
        )
    atomic_write(path, text)
    return path


def _read_report(file: Path) -> DoctorReport:
    """The report in a file."""
    try:
        return DoctorReport.load(file)
    except InputErrors:
        try:
            Machine.load(file)
        except InputErrors:
            pass
        else:
            raise RequestError(
                f"`{file}` describes a machine and is no report of `windlass doctor`; plans take "
                f"it as it is, with `--on {file}`"
            ) from None
        raise


def _require_faultless(path: Path, machine: Machine) -> None:
    """Refuses a machine with numbers that no machine has."""
    faults = [f"{path}: {fault}" for fault in machine_faults(machine)]
    if faults:
        raise InputErrors(faults)
