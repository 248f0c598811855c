"""Who may ask the server: its token, its names, and the sizes and times of a request."""

import asyncio
import hashlib
import hmac
import ipaddress
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_TOKEN_BYTES = 24
_COOKIE_SECONDS = 30 * 24 * 3600
_PUBLIC = ("/api/login",)
"""Paths of the API that need no token."""
_UPLOADS = "/api/sync/"
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


def make_token() -> str:
    """A new token of 192 random bits."""
    return secrets.token_urlsafe(_TOKEN_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What a request needs to be answered."""

    token: str
    """What programs send as `Authorization: Bearer`, and pages exchange for a cookie."""
    names: Collection[str] = LOOPBACK_NAMES
    """Names under which the server is asked; addresses of numbers are always allowed. Another name
    may be that of a foreign page that a resolver has pointed here (DNS rebinding)."""
    body_bytes: int = 2**16
    """Largest body of a request."""
    upload_bytes: int = 2**28
    """Largest file that another site may send."""
    seconds: float = 30.0
    """How long a client may let the server wait for its next bytes, or for taking bytes."""

    def has_token(self, token: str) -> bool:
        """Whether a token is the right one, in a time that does not tell how much of it is."""
        return hmac.compare_digest(token.encode(errors="replace"), self.token.encode())

    @property
    def cookie(self) -> tuple[str, str]:
        """Name and value of the cookie; other servers of the same host have other names."""
        return f"windlass-{self._derived('name')[:8]}", self._derived("session")

    @property
    def set_cookie(self) -> str:
        """The header that gives the cookie to a page; no script can read it."""
        name, value = self.cookie
        return f"{name}={value}; HttpOnly; SameSite=Strict; Path=/; Max-Age={_COOKIE_SECONDS}"

    def is_known(self, headers: Headers) -> bool:
        """Whether a request has the token or the cookie."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return self.has_token(token.strip())
        name, value = self.cookie
        try:
            sent = SimpleCookie(headers.get("cookie", ""))
        except CookieError:
            return False
        return name in sent and hmac.compare_digest(
            sent[name].value.encode(errors="replace"), value.encode()
        )

    def is_own_name(self, host: str) -> bool:
        """Whether the host of a request is one of the server's names, or a number."""
        name = _without_port(host)
        if name in self.names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _derived(self, purpose: str) -> str:
        return hmac.new(self.token.encode(), purpose.encode(), hashlib.sha256).hexdigest()


class Guard:
    """Answers requests that may not reach the application, and puts safe headers on all answers."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        refusal = self._refusal(scope, headers)
        limit = self._access.body_bytes
        if scope["path"].startswith(_UPLOADS) and refusal is None:
            limit = self._access.upload_bytes
        if refusal is None and _content_length(headers) > limit:
            refusal = (413, f"the body is larger than {limit} bytes, the most that is taken")
        safe_send = self._safe_send(scope, send)
        if refusal is not None:
            status, message = refusal
            answer = PlainTextResponse(f"{message}\n", status, {"Connection": "close"})
            await answer(scope, receive, safe_send)
            return
        try:
            await self._app(scope, self._bounded(receive, limit), safe_send)
        except TimeoutError:
            return  # a client that takes no bytes: the connection is closed

    def _refusal(self, scope: Scope, headers: Headers) -> tuple[int, str] | None:
        """Status and sentence, if the request may not be answered."""
        host = headers.get("host", "")
        if not self._access.is_own_name(host):
            return 400, "this server has another name; start it with `--name` and the one you use"
        path = scope["path"]
        if path.startswith("/api/") and path not in _PUBLIC and not self._access.is_known(headers):
            return 401, "the token is missing or wrong; open the link that `windlass serve` printed"
        origin = headers.get("origin")
        # A browser says from where a page sends; only pages of this server may change things.
        is_foreign = origin is not None and origin.partition("://")[2] != host
        if is_foreign and scope["method"] not in _SAFE_METHODS:
            return 403, "a page of another site may not change anything here"
        return None

    def _bounded(self, receive: Receive, limit: int) -> Receive:
        """Reads a body of at most `limit` bytes, from a client that keeps sending."""
        taken = 0
        ended = False

        async def bounded() -> Message:
            nonlocal taken, ended
            if ended:  # what is left to hear is that the client goes away, whenever that is
                return await receive()
            try:
                async with asyncio.timeout(self._access.seconds):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, "the body of the request did not arrive") from None
            taken += len(message.get("body", b""))
            ended = not message.get("more_body", False)
            if taken > limit:
                raise HTTPException(
                    413, f"the body is larger than {limit} bytes, the most that is taken"
                )
            return message

        return bounded

    def _safe_send(self, scope: Scope, send: Send) -> Send:
        async def safe_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
                stored = "no-cache" if not scope["path"].startswith("/api/") else "no-store"
                headers.setdefault("Cache-Control", stored)
            async with asyncio.timeout(self._access.seconds):
                await send(message)

        return safe_send


def _content_length(headers: Headers) -> int:
    length = headers.get("content-length", "0")
    return int(length) if length.isdecimal() and len(length) < 19 else 2**63


def _without_port(host: str) -> str:
    """The name of `name:8321` or `[::1]:8321`, in small letters."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()
