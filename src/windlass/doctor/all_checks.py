"""`doctor`: runs all checks of this machine, and puts what they found into one report."""

import re
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from windlass.atomic_files import cache_folder, require_output_file
from windlass.doctor.check_process import CheckRun, read_system, run_checks
from windlass.errors import InputErrors, RunBroken, StorageError, WindlassError
from windlass.hardware import load_local_machine, machine_names
from windlass.jobs import Progress
from windlass.schema import DoctorCheck, DoctorReport, DoctorSystem, Machine

DOCTOR_FILE = Path("windlass-doctor.toml")
"""Where the command writes its report."""
_MOST_RANKS = 8
_LONGEST_NAME = 60
_RANK_SECONDS = 60.0
"""Time without news after which ranks hang: an exchange takes milliseconds."""

OnCheck = Callable[[DoctorCheck], None]
"""Called with the outcome of each check as it ends."""


def doctor(*, on_check: OnCheck | None = None, progress: Progress | None = None) -> DoctorReport:
    """Tries out this machine and its devices, in about two minutes, and returns what was found.

    Each kernel, allocator, exchange between processes and kind of plan is compared with a plain
    computation; rates are measured, unless that was done before; and a small model trains beside
    its prediction. Checks run in processes of their own, so one that fails stops no other.

    Args:
        on_check: called with the outcome of each check as it ends.
        progress: called with how far it is.

    Raises:
        StorageError: there is no room for temporary files.
    """
    start = time.monotonic()
    checks: list[DoctorCheck] = []
    with tempfile.TemporaryDirectory(prefix="windlass-doctor-") as name:
        folder = Path(name)
        if progress is not None:
            progress("loading torch", 0, None)
        system: DoctorSystem | None = None
        results: Iterator[DoctorCheck]
        try:
            system = read_system(folder)
        except RunBroken as error:
            results = iter((_without_torch(str(error)),))
        else:
            results = _all_checks(system, folder, progress)
        if progress is not None:
            progress("loading torch", 1, 1)
        for check in results:
            checks.append(check)
            if on_check is not None:
                on_check(check)
    measured = any(check.group == "machine" and check.status != "failed" for check in checks)
    machine = load_local_machine(cache_folder()) if measured else None
    return DoctorReport(
        name=_machine_name(system),
        date=datetime.now(UTC).date().isoformat(),
        seconds=time.monotonic() - start,
        system=system,
        checks=tuple(checks),
        machine=None if machine is None else _anonymous(machine, _machine_name(system)),
    )


def require_report_file(path: Path) -> None:
    """Refuses a path where no report can be written, or where another file is.

    Raises:
        StorageError: the path cannot be written, or holds something else than a report.
    """
    require_output_file(path)
    if path.suffix not in (".toml", ".json"):
        raise StorageError(f"`{path}` is no name of a report; let it end in `.toml` or `.json`")
    if not path.exists():
        return
    try:
        DoctorReport.load(path)
    except (WindlassError, InputErrors):
        raise StorageError(
            f"`{path}` exists and is no report of `windlass doctor`; name another file with `--out`"
        ) from None


def _all_checks(
    system: DoctorSystem, folder: Path, progress: Progress | None
) -> Iterator[DoctorCheck]:
    for number, run in enumerate(check_runs(system)):
        yield from run_checks(run, folder / str(number), progress)


def check_runs(system: DoctorSystem) -> Iterator[CheckRun]:
    """The groups of checks of a machine, in the order in which they run.

    Kernels and memory on each device; exchanges on 2, 4 and so on up to all devices; then what
    needs the whole machine. A CPU counts as two devices, or more where it has more cores.
    """
    kind, count = system.kind, len(system.accelerators)
    devices = [f"{kind}:{index}" for index in range(count)] or [kind]
    for device in devices:
        yield CheckRun("kernels", device)
        yield CheckRun("memory", device)
    most = count or max(2, min(system.cores, _MOST_RANKS))
    ranks = sorted({2**power for power in range(1, most.bit_length()) if 2**power <= most} | {most})
    for number in ranks:
        if number > 1:
            yield CheckRun("ranks", kind, ranks=number, limit_seconds=_RANK_SECONDS)
    yield CheckRun("machine", kind)
    yield CheckRun("plans", kind, devices=most)
    yield CheckRun("steps", kind, devices=most, limit_seconds=600.0)


def _without_torch(reason: str) -> DoctorCheck:
    return DoctorCheck(
        group="kernels", name="torch", device="cpu", status="failed", detail=reason,
        way_out="install torch as its documentation says for this device, and run it again",
    )  # fmt: skip


def _machine_name(system: DoctorSystem | None) -> str:
    """A name made from the model of accelerator or processor, and from how many there are."""
    if system is None:
        return "unknown"
    models = system.accelerators or (system.processor,)
    words = re.findall(r"[a-z0-9.]+", models[0].lower())
    name = "-".join(words)[:_LONGEST_NAME].strip(".-") or system.kind
    count = len(models) if system.accelerators else system.cores
    name = f"{name}-x{count}" if count > 1 else name
    return f"{name}-measured" if name in machine_names() else name


def _anonymous(machine: Machine, name: str) -> Machine:
    """The measured machine under a name, without the fingerprint of this very system."""
    source = "measured by `windlass doctor`"
    return machine.model_copy(update={"name": name, "system": None, "source": source})
