"""Promises about servers that are not Windlass's, and may be anybody's."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from windlass.errors import RecordError
from windlass.record import remote, sync_runs

TOKEN = "one that nobody else may have"  # noqa: S105  a test's own


@contextmanager
def answering(answer: bytes) -> Iterator[tuple[str, list[str]]]:
    """A server that answers every request with these bytes, and the requests that it got."""
    got: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def handle(self) -> None:
            head = []
            while (line := self.rfile.readline()).strip():
                head.append(line.decode())
            got.append("".join(head))
            self.wfile.write(answer)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", got
        finally:
            server.shutdown()
            thread.join()


def said(content: bytes) -> bytes:
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


def test_a_server_that_sends_on_elsewhere_does_not_give_the_token_away(tmp_path: Path) -> None:
    with answering(said(b"{}")) as (elsewhere, got):
        answer = f"HTTP/1.1 302 Found\r\nLocation: {elsewhere}/api/sync/runs\r\n\r\n"
        with answering(answer.encode()) as (url, asked):
            with pytest.raises(RecordError, match=f"sends on to `{elsewhere}/api/sync/runs`"):
                sync_runs(tmp_path, url, token=TOKEN)
            assert TOKEN in asked[0]
        assert got == []


@pytest.mark.parametrize(
    "answer",
    [said(b"<html>"), said(b"[1]"), said(b"[" * 10**5), b"SSH-2.0-OpenSSH\r\n", b"\0\xff\n\n", b""],
)
def test_a_server_of_another_kind_is_told_in_one_sentence(tmp_path: Path, answer: bytes) -> None:
    with answering(answer) as (url, _), pytest.raises(RecordError, match=r"does not answer"):
        sync_runs(tmp_path, url, token=TOKEN)


@pytest.mark.parametrize(
    ("head", "part", "reason"),
    [
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n", "it takes too long"),
        (b"HTTP/1.1 200 OK\r\n", b"X: y\r\n", "it takes too long"),
        (b"HTTP/1.1 200 OK\r\nX: ", b"y", "it takes too long"),
        (b"HTTP/1.1 200 OK\r\n\r\n", b" ", "it sends too slowly"),
    ],
    ids=["continues", "headers", "a header", "drips"],
)
def test_a_server_that_never_ends_an_answer_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: bytes, part: bytes, reason: str
) -> None:
    monkeypatch.setattr(remote, "_SECONDS", 0.3)
    with sending(head, part, pause=0.01) as url, pytest.raises(RecordError, match=reason):
        sync_runs(tmp_path, url, token=TOKEN)


def test_a_server_that_sends_without_end_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_MOST_TABLE_BYTES", 2**20)
    head = b"HTTP/1.1 200 OK\r\n\r\n"
    with sending(head, b" " * 2**16) as url, pytest.raises(RecordError, match="more than 1048576"):
        sync_runs(tmp_path, url, token=TOKEN)


@contextmanager
def sending(head: bytes, part: bytes, pause: float = 0.0) -> Iterator[str]:
    """A server that sends a part again and again, until the client goes."""

    class Handler(BaseHTTPRequestHandler):
        def handle(self) -> None:
            self.rfile.readline()
            with suppress(OSError):
                self.wfile.write(head)
                while True:
                    self.wfile.write(part)
                    time.sleep(pause)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
