"""`windlass serve`: the record of runs as a page and an API."""

import contextlib
from pathlib import Path

from windlass import api
from windlass.cli.console import ProgressBars, error_console, print_line
from windlass.record import RUNS


def serve(
    runs: Path = RUNS,
    *,
    host: str = api.SERVER_HOST,
    port: int = api.SERVER_PORT,
    token_file: Path | None = None,
    name: list[str] | None = None,
) -> None:
    """Serve the runs as a page and an API, until it is interrupted.

    It prints a link that opens the page. Only programs of this machine reach it, unless another
    address to listen on is named. For example: `windlass serve site-a/runs --port 0`.

    Args:
        runs: The folder that holds the run folders.
        host: The address to listen on; `0.0.0.0` is reached from other machines.
        port: The port; 0 takes any that is free.
        token_file: A file with the token; it is made with a new token if there is none.
        name: A name of this machine under which the page is opened, besides localhost.
    """
    token = None if token_file is None else api.read_token(token_file)
    with ProgressBars() as progress, contextlib.suppress(KeyboardInterrupt):
        api.serve(
            runs, host=host, port=port, token=token, names=name or (), ready=_print_link,
            progress=progress,
        )  # fmt: skip


def _print_link(link: str) -> None:
    print_line(link)
    error_console.print("open the link to see the runs; Ctrl-C ends the server", soft_wrap=True)
