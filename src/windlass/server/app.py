"""The application: its routes, its page, and how errors are told."""

import hashlib
import json
import re
from base64 import b64encode
from collections.abc import Mapping
from functools import cache
from html import escape
from importlib import resources
from pathlib import Path
from typing import Self

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Scope

from windlass.errors import StorageError, WindlassError
from windlass.record import Catalog, SyncReceiver
from windlass.report import PALETTE_CSS
from windlass.server.access import Access, Guard
from windlass.server.answers import body_of, json_answer
from windlass.server.change_feed import ChangeFeed
from windlass.server.changes import AnnotationAnswers, SyncAnswers
from windlass.server.live import LiveAnswers
from windlass.server.openapi import openapi_document
from windlass.server.run_answers import Analyses, RunAnswers

_SAVED_PATHS = ("/api/runs", "/api/curves", "/api/diff", "/api/columns")
_MOST_SAVED = 40


class RecordServer:
    """The application that serves the runs under a folder. Use it as a context manager."""

    def __init__(self, root: Path, catalog: Catalog, access: Access, analyses: Analyses) -> None:
        self._access = access
        self._feed = ChangeFeed(catalog)
        runs = RunAnswers(catalog, self._feed, analyses)
        self.routes = [
            *runs.routes(),
            *AnnotationAnswers(runs, self._feed).routes(),
            *LiveAnswers(catalog, self._feed).routes(),
            *SyncAnswers(SyncReceiver(root), self._feed).routes(),
            Route("/api/login", self._log_in, methods=["POST"]),
            Route("/api/openapi.json", self._openapi),
            Route("/api/page", self._page),
            Route("/", self._static),
            Route("/static/{name}", self._static),
        ]
        self._inner = Starlette(
            routes=self.routes,
            exception_handlers={HTTPException: _refuse, WindlassError: _explain, 500: _apologize},
        )
        self.app: ASGIApp = Guard(self._inner, access)
        """The ASGI application."""

    def __enter__(self) -> Self:
        self._feed.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._feed.__exit__()

    async def _log_in(self, request: Request) -> Response:
        """Exchanges the token for a cookie."""
        token = (await body_of(request)).get("token")
        if not isinstance(token, str) or not self._access.has_token(token):
            raise HTTPException(401, "the token is wrong; open the link of `windlass serve` again")
        return Response(status_code=204, headers={"Set-Cookie": self._access.set_cookie})

    async def _openapi(self, request: Request) -> Response:  # noqa: ARG002
        """What this API can be asked."""
        return json_answer(openapi_document())

    async def _page(self, request: Request) -> Response:
        """A view as one HTML file, with the answers that it shows."""
        paths = request.query_params.getlist("path")
        if len(paths) > _MOST_SAVED or not all(_is_saved(path) for path in paths):
            raise HTTPException(400, f"a file holds at most {_MOST_SAVED} answers on runs")
        answers = {path: json.loads(await _answer(self._inner, path)) for path in paths}
        page = one_file(request.query_params.get("view", ""), answers)
        name = 'attachment; filename="windlass.html"'
        return Response(page, media_type="text/html", headers={"Content-Disposition": name})

    async def _static(self, request: Request) -> Response:
        """The page and its parts."""
        name = request.path_params.get("name", "index.html")
        content = static_file(name)
        if content is None:
            raise HTTPException(404, "there is no such file")
        return Response(content, media_type=MEDIA_TYPES[Path(name).suffix])


def _is_saved(path: str) -> bool:
    place = path.partition("?")[0]
    return place in _SAVED_PATHS or place.startswith("/api/runs/")


async def _answer(app: ASGIApp, path: str) -> bytes:
    """The body of the answer to a request for a path, asked within this process."""
    place, _, query = path.partition("?")
    scope: Scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
        "method": "GET", "scheme": "http", "path": place, "raw_path": place.encode(),
        "query_string": query.encode(), "root_path": "", "headers": [], "client": None,
        "server": None,
    }  # fmt: skip
    body: list[bytes] = []
    status = 200

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)
        body.append(message.get("body", b""))

    await app(scope, receive, send)
    content = b"".join(body)
    if status != 200:
        raise HTTPException(status, content.decode(errors="replace").strip())
    return content


async def _refuse(request: Request, error: Exception) -> Response:  # noqa: ARG001
    """A refusal, in one sentence."""
    status = error.status_code if isinstance(error, HTTPException) else 400
    text = error.detail if isinstance(error, HTTPException) else str(error)
    headers = {"Connection": "close"} if status in (408, 413) else None
    return PlainTextResponse(f"{text}\n", status, headers)


async def _explain(request: Request, error: Exception) -> Response:  # noqa: ARG001
    """What is wrong with a request, or with the disk."""
    return PlainTextResponse(f"{error}\n", 507 if isinstance(error, StorageError) else 400)


async def _apologize(request: Request, error: Exception) -> Response:  # noqa: ARG001
    """A bug of ours, of which a client learns the name only."""
    text = f"this is a bug in Windlass ({type(error).__name__}); please report it\n"
    return PlainTextResponse(text, 500)


MEDIA_TYPES = {
    ".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".txt": "text/plain",
}  # fmt: skip
"""By suffix of the files of the page."""
MODULES = (
    "dom.js", "formats.js", "client.js", "chart.js", "bars.js", "lanes.js", "curves.js",
    "runs_view.js", "run_view.js", "compare_view.js", "diff_view.js", "app.js",
)  # fmt: skip
"""The page's modules; each imports only from those before it."""
_CHARTS, _CHARTS_CSS = "uPlot.iife.min.js", "uPlot.min.css"
_PALETTE = "palette.css"
_FILES = frozenset({"index.html", "app.css", _CHARTS, _CHARTS_CSS, "uPlot.LICENSE.txt", *MODULES})
_IMPORT = re.compile(r"^import\s[^;]*;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)


@cache
def static_file(name: str) -> str | None:
    """One of the files of the page; None if it has none of this name."""
    if name == _PALETTE:  # the colours of all other pages and figures
        return PALETTE_CSS
    if name not in _FILES:
        return None
    return (resources.files("windlass.server") / "static" / name).read_text(encoding="utf-8")


def one_file(view: str, answers: Mapping[str, object]) -> str:
    """A view as a self-contained HTML file; nothing is fetched, and only its own script runs.

    Args:
        view: the state of the page, as in its address behind `#`.
        answers: what the API answers to each path that the view asks for.
    """
    script = f'"use strict";{_text(_CHARTS)}\n(() => {{\n{_bundle()}}})();'
    style = "".join(_text(name) for name in (_PALETTE, _CHARTS_CSS, "app.css"))
    # JSON in a script element is no script; `<` could end the element.
    data = json.dumps({"view": view, "answers": answers}).replace("<", "\\u003c")
    policy = (
        f"default-src 'none'; script-src '{_source(script)}'; style-src '{_source(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        '<meta name="referrer" content="no-referrer">'
        f"<title>Windlass</title><style>{style}</style></head><body>"
        f'<script type="application/json" id="saved">{data}</script>'
        f"<script>{script}</script></body></html>\n"
    )


@cache
def _bundle() -> str:
    """All modules as one script, without what they import and export."""
    return "".join(_EXPORT.sub("", _IMPORT.sub("", _text(name))) for name in MODULES)


def _text(name: str) -> str:
    return static_file(name) or ""


def _source(text: str) -> str:
    """What a policy calls an inline script or style that has exactly this text."""
    return f"sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
