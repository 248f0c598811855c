"""Listens on a port, and lets no slow client hold the server."""

import asyncio
import socket
from collections.abc import Sequence

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from windlass.errors import RequestError
from windlass.server.access import Access

_MOST_CONNECTIONS = 256
_IDLE_SECONDS = 15
_HEAD_SECONDS = 10.0
"""How long the head of a request may take to arrive."""
_LONGEST_HEAD = 2**16


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens.

    Args:
        host: the address, or a name of this machine.
        port: the port; 0 takes any that is free.

    Raises:
        RequestError: the port is taken, or this machine has no such address.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_MOST_CONNECTIONS)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise RequestError(
            f"port {port} of `{host}` cannot be listened on ({reason.lower()}); name another one "
            "with `--port`, or 0 for any that is free"
        ) from None


def link_of(listening: socket.socket, access: Access, names: Sequence[str] = ()) -> str:
    """The link that opens the page; the token stands behind `#`, which no browser sends.

    Args:
        listening: the socket.
        access: who may ask.
        names: names of this machine for pages, the best first.
    """
    host, port = listening.getsockname()[:2]
    host = "127.0.0.1" if host in ("0.0.0.0", "::") else host  # noqa: S104  not listened on
    host = names[0] if names else host
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/#token={access.token}"


def serve_app(app: ASGIApp, listening: socket.socket) -> uvicorn.Server:
    """A server that answers on a socket: `run([listening])` serves until it is interrupted."""
    config = uvicorn.Config(
        app,
        http=BoundedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        limit_concurrency=_MOST_CONNECTIONS,
        timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=_LONGEST_HEAD,
    )
    # Head and body of an answer are two writes: without this the second waits 40 ms for the client.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listening.setblocking(False)
    return uvicorn.Server(config)


class BoundedProtocol(H11Protocol):
    """HTTP/1.1 whose clients have a few seconds to send the head of a request."""

    head_seconds = _HEAD_SECONDS
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Waits for the first request."""
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        """Takes bytes; those of a head do not prolong its time."""
        cycle = self.cycle
        super().data_received(data)
        if self.cycle is not cycle:
            self._end_waiting()
        elif self.cycle is None or self.cycle.response_complete:
            self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets the connection."""
        self._end_waiting()
        super().connection_lost(exc)

    def _wait_for_head(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.head_seconds, self.transport.close)

    def _end_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
