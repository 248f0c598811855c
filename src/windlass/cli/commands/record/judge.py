"""`windlass judge`: what is to be thought of a run."""

import sys
from pathlib import Path

from windlass import api
from windlass.api import AsJson, Flag
from windlass.cli.console import print_json, print_verdict
from windlass.judge import Verdict
from windlass.stop_signals import graceful_stop
from windlass.tracking import find_run


def judge(
    run: str = "last",
    *,
    live: Flag = False,
    alert: str | None = None,
    runs: Path = api.RUNS,
    as_json: AsJson = False,
) -> None:
    """Judge a run: expected, slow, broken, or unknown, and why.

    The exit code is 0 for expected and unknown, and 1 for slow and broken. For example: `windlass
    judge last --live --alert 'notify-send windlass'`.

    Args:
        run: Folder, name, the first characters of its id, or `last`.
        live: Follow a run that is going on, and print each new verdict.
        alert: On slow and broken, run this command with the verdict as JSON on its standard input,
            or send it to this address (http://, https://).
        runs: The folder that holds the run folders.
        as_json: Print the verdict as JSON.
    """
    if alert is not None:
        api.require_alert(alert)
    folder = find_run(runs, run)
    verdict: Verdict | None = None
    with graceful_stop() as stop:
        found = api.follow_verdict(folder, root=runs, stop=stop) if live else ()
        for verdict in found or (api.judge(folder, root=runs),):
            if as_json:
                print_json(verdict.model_dump(mode="json"))
            else:
                print_verdict(verdict)
            if alert is not None and verdict.is_alarm:
                api.send_alert(alert, verdict, folder)
    if verdict is not None and verdict.is_alarm:
        sys.exit(1)
