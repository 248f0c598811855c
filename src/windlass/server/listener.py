"""Listens on a port, and lets no slow client hold the server."""

import asyncio
import socket
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import uvicorn
from starlette.datastructures import Headers
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from windlass.errors import RequestError
from windlass.server.access import Access

_MOST_CONNECTIONS = 256
_IDLE_SECONDS = 15
_MOST_STRANGERS, _MOST_OF_ADDRESS = 128, 64
"""Most connections of clients that have not shown the token, of all addresses and of one. Many
may come from one, such as that of a reverse proxy."""
_HEAD_SECONDS, _STRANGER_SECONDS = 10.0, 3.0
"""How long the head of a request may take to arrive, from all and from who has not shown the token.
"""
_REQUEST_SECONDS = 10.0
"""How long a whole request and its answer may take without the token."""
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
        names: names of this machine for pages, the best first.
    """
    host, port = listening.getsockname()[:2]
    host = "127.0.0.1" if host in ("0.0.0.0", "::") else host  # noqa: S104  not listened on
    host = names[0] if names else host
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/#token={access.token}"


def serve_app(app: ASGIApp, listening: socket.socket, access: Access) -> uvicorn.Server:
    """A server that answers on a socket: `run([listening])` serves until it is interrupted.

    Args:
        access: who may ask; those who may keep connections that others would have to give up.
    """
    config = uvicorn.Config(
        app,
        http=cast(type[asyncio.Protocol], partial(BoundedProtocol, access, Strangers())),
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
    """HTTP/1.1 whose clients have a few seconds to send the head of a request.

    A client is a stranger until it has sent the token or the cookie.
    """

    head_seconds = _HEAD_SECONDS
    stranger_seconds = _STRANGER_SECONDS
    _deadline: asyncio.TimerHandle | None = None

    def __init__(self, access: Access, strangers: "Strangers", *args: Any, **more: Any) -> None:  # noqa: ANN401  uvicorn's own arguments
        super().__init__(*args, **more)
        self._access, self._strangers = access, strangers

    @property
    def is_idle(self) -> bool:
        """Whether no request of this connection is being answered."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def address(self) -> str:
        """The address of the client; empty if it is gone already."""
        return self.client[0] if self.client else ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Waits for the first request."""
        super().connection_made(transport)
        self._strangers.add(self)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        """Takes bytes; those of a head do not prolong its time."""
        cycle = self.cycle
        super().data_received(data)
        if self.cycle is cycle:
            if self.is_idle:
                self._wait_for_head()
            return
        self._end_waiting()
        if self._access.is_known(Headers(raw=self.headers)):
            self._strangers.remove(self)
        else:
            self._wait(_REQUEST_SECONDS)

    def on_response_complete(self) -> None:
        """Waits for the next request, which may come as late as uvicorn allows."""
        self._end_waiting()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets the connection."""
        self._end_waiting()
        self._strangers.remove(self)
        super().connection_lost(exc)

    def _wait_for_head(self) -> None:
        most = self.stranger_seconds if self in self._strangers else self.head_seconds
        self._wait(min(most, self.head_seconds))

    def _wait(self, seconds: float) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(seconds, self.transport.close)

    def _end_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class Strangers:
    """The connections of clients that have not shown the token, of which only so many stay open.

    Where there are too many, of one address or of all, the one goes that is idle the longest: who
    has something to ask does so at once, and whoever only holds connections loses his own.
    """

    def __init__(self) -> None:
        self._by_address: dict[str, dict[BoundedProtocol, None]] = {}
        self._all: dict[BoundedProtocol, None] = {}

    def __contains__(self, client: BoundedProtocol) -> bool:
        return client in self._all

    def add(self, client: BoundedProtocol) -> None:
        """Takes one more, and closes another one if it is one too many."""
        same = self._by_address.setdefault(client.address, {})
        for clients, most in ((same, _MOST_OF_ADDRESS), (self._all, _MOST_STRANGERS)):
            if len(clients) >= most:
                goes = next((one for one in clients if one.is_idle), next(iter(clients)))
                self.remove(goes)
                goes.transport.abort()
        self._all[client] = None
        self._by_address.setdefault(client.address, {})[client] = None

    def remove(self, client: BoundedProtocol) -> None:
        """Forgets one, which is known now or is gone."""
        self._all.pop(client, None)
        same = self._by_address.get(client.address, {})
        same.pop(client, None)
        if not same:
            self._by_address.pop(client.address, None)
