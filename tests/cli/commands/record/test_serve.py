"""Promises about `windlass serve`."""

import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from windlass import api
from windlass.errors import RequestError
from windlass.tracking import create_run_folder


def test_the_printed_link_has_the_token_and_ctrl_c_ends_the_server(tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    command = (sys.executable, "-m", "windlass", "serve", str(tmp_path / "runs"), "--port", "0")
    with subprocess.Popen(
        (*command, "--token-file", str(token_file)),
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as server:  # fmt: skip
        assert server.stdout is not None
        link, _, token = server.stdout.readline().strip().partition("#token=")
        request = urllib.request.Request(  # noqa: S310
            f"{link}api/runs", headers={"Authorization": f"Bearer {token}"}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310
            assert answer.status == 200
        server.send_signal(signal.SIGINT)
        assert server.wait(10) == 0
    assert token_file.read_text().strip() == token
    assert token_file.stat().st_mode & 0o077 == 0


def test_reading_the_runs_has_ended_when_the_server_answers(tmp_path: Path) -> None:
    """A log would say for ever how many are read."""
    with create_run_folder(tmp_path, "tiny", documents={}, meta={"model": "tiny"}) as run:
        run.end("finished")
    said: list[tuple[str, int, int | None]] = []

    def ready(_: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        api.serve(tmp_path, port=0, ready=ready, progress=lambda *words: said.append(words))
    assert said[-1] == ("reading runs", 1, 1)


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RequestError, match=f"port {port} of `127.0.0.1`"):
            api.serve(tmp_path, port=port)


def test_a_short_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="3 characters"):
        api.serve(tmp_path, token="abc")  # noqa: S106
