"""`windlass doctor`: tries out this machine, and writes one file that can be sent to others."""

import sys
from collections import Counter
from pathlib import Path

from rich.text import Text

from windlass import api
from windlass.api import AsJson
from windlass.cli.console import ProgressBars, console, print_json, print_written
from windlass.schema import CheckStatus, DoctorCheck, DoctorReport
from windlass.units import format_seconds

_COLORS: dict[CheckStatus, str] = {
    "ok": "green", "slow": "yellow", "failed": "bold red", "skipped": "dim",
}  # fmt: skip
_STATUS_WIDTH, _GROUP_WIDTH, _DEVICE_WIDTH, _NAME_WIDTH = 8, 8, 8, 36


def doctor(*, out: Path = api.DOCTOR_FILE, as_json: AsJson = False) -> None:
    """Try out this machine and its devices (about two minutes), and write a report of it.

    Each kernel, allocator, exchange between processes and kind of plan is compared with a plain
    computation. Rates are measured if they were not, or if the machine has become slower or
    faster; that takes about a minute more. A small model trains beside its prediction. The exit
    code is 0 if nothing failed, and 1 if something did.

    The report names models of processors and accelerators, versions of libraries and figures. It
    holds no user or host name, no path and no environment variable. `windlass machines add` takes
    it, on this machine or another, so that plans can name the machine.

    Args:
        out: The report, a `.toml` or `.json` file. A report of that name is replaced, another
            file is not.
        as_json: Print the report as JSON in place of a line for each check.
    """
    api.require_report_file(out)
    with ProgressBars() as progress:
        report = api.doctor(on_check=None if as_json else _print_check, progress=progress)
    report.save(out)
    if as_json:
        print_json(report)
    else:
        _print_end(report)
    print_written(out)
    if report.failed:
        sys.exit(1)


def _print_check(check: DoctorCheck) -> None:
    """One line: status, group, device, name, what was found; below it what to do."""
    console.print(
        Text.assemble(
            (f"{check.status:<{_STATUS_WIDTH}}", _COLORS[check.status]),
            f"{check.group:<{_GROUP_WIDTH}}{check.device:<{_DEVICE_WIDTH}} "
            f"{check.name:<{_NAME_WIDTH}} {check.detail}",
        ),
        soft_wrap=True,
    )
    if check.way_out is not None:
        console.print(f"{'':<{_STATUS_WIDTH}}-> {check.way_out}", soft_wrap=True, style="dim")


def _print_end(report: DoctorReport) -> None:
    counts = Counter(check.status for check in report.checks)
    words = ", ".join(f"{counts[status]} {status}" for status in _COLORS if counts[status])
    console.print(
        f"{len(report.checks)} checks in {format_seconds(report.seconds)}: {words}", style="bold"
    )
    console.print(
        "The report holds no user or host name, no path and no environment variable. Send it to "
        "the project with an issue; `windlass machines add` takes it in.",
        soft_wrap=True,
    )
