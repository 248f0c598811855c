"""Promises about who may ask the server."""

import json
import re
import socket
import time
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from pathlib import Path

import pytest
from served_record import KNOWN, TOKEN, Served, make_record, serve

from windlass.server import Access, make_token
from windlass.server.listener import BoundedProtocol


@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Bearer wrong"}, {"Cookie": "windlass-00000000=ü"}]
)
def test_without_the_right_token_nothing_is_answered(
    served: Served, headers: dict[str, str]
) -> None:
    encoded = {name: value.encode() for name, value in headers.items()}
    for path in ("/api/runs", "/api/openapi.json", "/api/sync/runs", "/api/none", "/api/page"):
        status, _, body = served.send("GET", path, headers=encoded)  # type: ignore[arg-type]
        assert status == 401
        assert body.decode().count("\n") == 1
        assert b"token is missing or wrong" in body


def test_the_token_is_exchanged_for_a_cookie_that_no_script_reads(served: Served) -> None:
    json_type = {"Content-Type": "application/json"}
    wrong, _, _ = served.send("POST", "/api/login", b'{"token": "no"}', json_type)
    status, headers, _ = served.send(
        "POST", "/api/login", json.dumps({"token": TOKEN}).encode(), json_type
    )

    assert (wrong, status) == (401, 204)
    cookie = headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert TOKEN not in cookie
    known = {"Cookie": cookie.partition(";")[0]}
    assert served.send("GET", "/api/runs", headers=known)[0] == 200


def test_a_foreign_name_that_points_here_is_refused(served: Served) -> None:
    for host, status in (
        ("evil.example:80", 400), ("127.0.0.1.evil.example", 400), ("localhost:99", 200),
        ("127.0.0.1", 200), ("[::1]:8321", 200), ("10.1.2.3:8321", 200),
    ):  # fmt: skip
        assert served.send("GET", "/api/runs", headers=KNOWN | {"Host": host})[0] == status, host


def test_a_page_of_another_site_changes_nothing(served: Served) -> None:
    run = served.ids()[0]
    headers = KNOWN | {"Content-Type": "application/json", "Origin": "https://evil.example"}
    path = f"/api/runs/{run}/annotations"
    assert served.send("POST", path, b'{"tags": ["x"]}', headers)[0] == 403
    form = KNOWN | {"Content-Type": "text/plain"}
    assert served.send("POST", path, b'{"tags": ["x"]}', form)[0] == 400
    assert served.ask(f"/api/runs/{run}")["tags"] == []


def test_no_answer_lets_a_page_run_foreign_scripts(served: Served) -> None:
    for path in ("/", "/static/app.js", "/api/runs", "/nothing", "/api/runs/none"):
        _, headers, _ = served.send("GET", path, headers=KNOWN)
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self'" in policy
        assert "unsafe" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert "Access-Control-Allow-Origin" not in headers


def test_the_page_has_no_script_or_style_of_its_own(served: Served) -> None:
    _, _, body = served.send("GET", "/")
    page = body.decode()
    assert not re.search(r"<script(?![^>]*\ssrc=)|<style|\son\w+=|\sstyle=|javascript:", page)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large_is_refused(served: Served, chunked: bool) -> None:
    path = f"/api/runs/{served.ids()[0]}/annotations"
    body = b'{"note": "' + b"x" * 2**17 + b'"}'
    headers = KNOWN | {"Content-Type": "application/json"}
    with socket.create_connection(("127.0.0.1", served.port), timeout=10) as client:
        length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(body)}"
        lines = [f"POST {path} HTTP/1.1", "Host: localhost", length]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        client.sendall("\r\n".join(lines).encode() + b"\r\n\r\n")
        if chunked:
            client.sendall(f"{len(body):x}\r\n".encode() + body[: 2**16 + 1000])
        answer = client.recv(1000)
    assert answer.startswith(b"HTTP/1.1 413")


def test_slow_clients_are_let_go_while_others_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundedProtocol, "head_seconds", 0.4)
    make_record(tmp_path)
    head = b"POST /api/login HTTP/1.1\r\nHost: localhost\r\n"
    body = b"Content-Type: application/json\r\nContent-Length: 20\r\n\r\n{"
    with serve(tmp_path, access=Access(token=TOKEN, seconds=0.4)) as served:
        clients = [socket.create_connection(("127.0.0.1", served.port), 10) for _ in range(30)]
        for index, client in enumerate(clients):
            client.sendall((b"", head, head + body)[index % 3])
        began = time.perf_counter()
        assert served.send("GET", "/api/runs", headers=KNOWN)[0] == 200
        answers = []
        for client in clients:
            answers.append(client.recv(100))
            client.close()
    assert time.perf_counter() - began < 5
    assert {answer[:12] for answer in answers} == {b"", b"HTTP/1.1 408"}


def test_tokens_are_new_and_long() -> None:
    tokens = {make_token() for _ in range(100)}
    assert len(tokens) == 100
    assert min(map(len, tokens)) >= 32


def is_closed(client: socket.socket) -> bool:
    """Whether a server closes a connection, for which it has as long as the socket waits."""
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def test_hundreds_of_idle_strangers_keep_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundedProtocol, "stranger_seconds", 1.0)
    make_record(tmp_path)
    with ExitStack() as opened, serve(tmp_path) as served:
        idle = [
            opened.enter_context(
                socket.create_connection(
                    ("127.0.0.1", served.port), 10, source_address=(f"127.0.0.{1 + index % 3}", 0)
                )
            )
            for index in range(300)
        ]
        for client in idle[::2]:
            client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
        began = time.perf_counter()
        for _ in range(3):
            assert served.send("GET", "/api/runs", headers=KNOWN)[0] == 200
            assert served.send("GET", "/")[0] == 200
        assert time.perf_counter() - began < 2
        assert is_closed(idle[0])  # the oldest made room at once
        assert all(map(is_closed, idle))
        assert time.perf_counter() - began < 8


def test_who_has_shown_the_token_loses_no_connection_to_strangers(served: Served) -> None:
    with ExitStack() as opened, closing(HTTPConnection("127.0.0.1", served.port)) as known:
        known.request("GET", "/api/runs", headers=KNOWN)
        known.getresponse().read()
        for _ in range(80):
            address = ("127.0.0.1", served.port)
            opened.enter_context(socket.create_connection(address, 10))
        assert known.sock is not None
        before = known.sock
        known.request("GET", "/api/runs", headers=KNOWN)
        assert known.getresponse().status == 200
        assert known.sock is before
