"""What a page may change of runs, and the files that other sites send."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from windlass.errors import RecordError
from windlass.record import SyncReceiver, annotate
from windlass.server.answers import body_of, json_answer
from windlass.server.change_feed import ChangeFeed
from windlass.server.run_answers import RunAnswers

T = TypeVar("T")
_LISTS, _FLAGS = ("tags", "remove"), ("archived", "broken")


class AnnotationAnswers:
    """Takes tags, notes, and what is archived or broken."""

    def __init__(self, runs: RunAnswers, feed: ChangeFeed) -> None:
        self._runs, self._feed = runs, feed

    def routes(self) -> list[Route]:
        """The paths that are answered."""
        return [Route("/api/runs/{id}/annotations", self.annotate, methods=["POST"])]

    async def annotate(self, request: Request) -> Response:
        """Adds one change to a run, and answers with all changes together."""
        change = _change(await body_of(request))
        row = await run_in_threadpool(self._runs.row, request)
        found = await run_in_threadpool(lambda: annotate(row.folder, **change))
        await run_in_threadpool(self._feed.refresh)
        return json_answer(
            {
                "tags": found.tags,
                "notes": found.notes,
                "archived": found.archived,
                "broken": found.broken,
            }
        )


class SyncAnswers:
    """Takes and gives the files of runs, as `windlass sync` asks."""

    def __init__(self, receiver: SyncReceiver, feed: ChangeFeed) -> None:
        self._receiver, self._feed = receiver, feed
        self._mutex = threading.Lock()

    def routes(self) -> list[Route]:
        """The paths that are answered."""
        file = "/api/sync/runs/{id}/files/{name:path}"
        return [
            Route("/api/sync/runs", self.runs),
            Route("/api/sync/runs/{id}", self.files),
            Route(file, self.file, methods=["GET"]),
            Route(file, self.put, methods=["PUT"]),
        ]

    def runs(self, request: Request) -> Response:  # noqa: ARG002
        """The folder of each run by its id."""
        return Response(self._locked(self._receiver.runs), media_type="application/json")

    def files(self, request: Request) -> Response:
        """The size of each file of a run by its name."""
        run = request.path_params["id"]
        content = self._locked(lambda: self._receiver.files(run))
        return Response(content, media_type="application/json")

    def file(self, request: Request) -> Response:
        """A file, its first bytes, or its SHA-256."""
        run, name = request.path_params["id"], request.path_params["name"]
        if request.query_params.get("digest"):
            return PlainTextResponse(self._locked(lambda: self._receiver.digest(run, name)))
        text = request.query_params.get("length")
        if text is not None and not (text.isascii() and text.isdecimal() and len(text) < 19):
            raise HTTPException(400, "`length` should be a number of bytes")
        length = None if text is None else int(text)
        content = self._locked(lambda: self._receiver.read(run, name, length))
        return Response(content, media_type="application/octet-stream")

    async def put(self, request: Request) -> Response:
        """Takes a whole file; sent again it changes nothing."""
        run, name = request.path_params["id"], request.path_params["name"]
        folder = request.query_params.get("folder", "")
        # As large as a checkpoint's: it waits on the disk, under no name.
        with self._receiver.arriving() as content:
            async for part in request.stream():
                await run_in_threadpool(content.write, part)
            await run_in_threadpool(
                self._locked, lambda: self._receiver.put(run, name, folder, content)
            )
        self._feed.look()
        return Response(status_code=204)

    def _locked(self, action: Callable[[], T]) -> T:
        """The receiver takes one file at a time."""
        with self._mutex:
            try:
                return action()
            except RecordError as error:
                raise HTTPException(409, str(error)) from None


def _change(body: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `annotate`."""
    faults = [f"`{key[:40]}` is no change" for key in body if key not in (*_LISTS, *_FLAGS, "note")]
    for key in _LISTS:
        words = body.get(key, [])
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            faults.append(f"`{key}` should be a list of texts")
    faults += [
        f"`{key}` should be true or false"
        for key in _FLAGS
        if not isinstance(body.get(key), bool | None)
    ]
    if not isinstance(body.get("note"), str | None):
        faults.append("`note` should be a text")
    if faults:
        raise HTTPException(400, "; ".join(faults))
    return body
