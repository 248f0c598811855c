"""`windlass sync`: one record of the runs of many sites."""

import os
from pathlib import Path

from windlass import api
from windlass.api import AsJson, Flag
from windlass.atomic_files import read_regular_file
from windlass.cli.console import ProgressBars, print_json, print_line, print_notes
from windlass.errors import RequestError
from windlass.record import MergeReport, without_secrets
from windlass.stop_signals import graceful_stop

_TOKEN_VARIABLE = "WINDLASS_TOKEN"  # noqa: S105  the name of a variable
_TOKEN_BYTES = 4096


def sync(
    target: str,
    *,
    runs: Path = api.RUNS,
    token_file: Path | None = None,
    checkpoints: Flag = False,
    follow: Flag = False,
    as_json: AsJson = False,
) -> None:
    """Send to another place whatever it lacks of the runs here, also of those still going on.

    For example: `windlass sync s3://team/runs`, or `windlass sync https://record.example.org`.

    Args:
        target: A folder, a URL that fsspec opens, or the address of a `windlass serve`.
        runs: The folder that holds the run folders.
        token_file: A file with the server's token; else the variable WINDLASS_TOKEN has it.
        checkpoints: Send checkpoints too.
        follow: Go on sending what is added, until it is interrupted; a target that is away is asked
            again until it is back.
        as_json: Print what was done as JSON.
    """
    token = os.environ.get(_TOKEN_VARIABLE) if token_file is None else _read_token(token_file)
    if follow:
        with graceful_stop() as stop:
            for found in api.follow_sync(
                target, root=runs, token=token, checkpoints=checkpoints, stop=stop
            ):
                if isinstance(found, str):
                    print_notes([found])
                else:
                    _print_report(found, without_secrets(target), as_json=as_json)
        return
    with ProgressBars() as progress:
        report = api.sync_runs(
            target, root=runs, token=token, checkpoints=checkpoints, progress=progress
        )
    _print_report(report, without_secrets(target), as_json=as_json)


def _read_token(path: Path) -> str:
    try:
        return read_regular_file(path, most_bytes=_TOKEN_BYTES).decode(errors="replace").strip()
    except OSError as error:
        reason = (error.strerror or "").lower()
        raise RequestError(f"the token file `{path}` cannot be read: {reason}") from None


def _print_report(report: MergeReport, target: str, *, as_json: bool) -> None:
    if as_json:
        print_json(report)
        return
    for line in report.lines(target):
        print_line(line)
