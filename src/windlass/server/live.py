"""What grows while somebody looks: server-sent events with changed runs and new points."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from windlass.errors import RecordError
from windlass.record import Catalog
from windlass.server.answers import names_of, number_of
from windlass.server.change_feed import ChangeFeed
from windlass.tracking import SYSTEM_PREFIX, JournalCursor, Series, journal_files, series_of

_PAUSE_SECONDS, _BEAT_SECONDS = 1.0, 15.0
_LONGEST_SECONDS = 600.0
"""A page opens the stream anew after so long, with the token that is valid then."""
_MOST_STREAMS, _MOST_RUNS, _MOST_POINTS = 64, 50, 5_000


class LiveAnswers:
    """Sends what grows, to at most 64 pages at once."""

    def __init__(self, catalog: Catalog, feed: ChangeFeed) -> None:
        self._catalog, self._feed = catalog, feed
        self._streams = 0

    def routes(self) -> list[Route]:
        """The paths that are answered."""
        return [Route("/api/live", self.live)]

    async def live(self, request: Request) -> Response:
        """A stream of events: `runs` with ids that have changed, `points` with new points."""
        ids, names = names_of(request, "ids"), names_of(request, "names")
        if len(ids) > _MOST_RUNS:
            raise HTTPException(400, f"{len(ids)} runs at once are more than {_MOST_RUNS}")
        after = [int(step) for step in _steps_of(request)]
        if len(after) != len(ids):
            raise HTTPException(400, "`after` should have a step for each of `ids`")
        since = number_of(request, "since", 0, 2**53)
        if self._streams >= _MOST_STREAMS:
            raise HTTPException(503, f"{_MOST_STREAMS} pages are followed already; try again later")
        try:
            folders = [(await run_in_threadpool(self._catalog.row, run)).folder for run in ids]
        except RecordError:
            raise HTTPException(404, "one of these runs is not there") from None
        tails = [
            _RunTail(run, folder, names, step)
            for run, folder, step in zip(ids, folders, after, strict=True)
        ]
        headers = {"X-Accel-Buffering": "no"}
        return StreamingResponse(
            self._events(tails, since), media_type="text/event-stream", headers=headers
        )

    async def _events(self, tails: "Sequence[_RunTail]", since: int) -> AsyncIterator[str]:
        self._streams += 1
        try:
            began = beat = time.monotonic()
            yield "retry: 3000\n\n"
            while time.monotonic() - began < _LONGEST_SECONDS:
                self._feed.look()
                changes = self._feed.changes(since)
                since = changes.version
                sent = False
                if changes.runs:
                    yield _event("runs", {"version": since, "ids": changes.runs})
                    sent = True
                for tail in tails:
                    points = await run_in_threadpool(tail.read)
                    if points is not None:
                        if points["restarted"]:  # curves that are asked for now have its steps
                            await run_in_threadpool(self._feed.refresh)
                        yield _event("points", points)
                        sent = True
                if sent:
                    beat = time.monotonic()
                elif time.monotonic() - beat > _BEAT_SECONDS:
                    beat = time.monotonic()
                    yield ": still here\n\n"
                await asyncio.sleep(_PAUSE_SECONDS)
        finally:
            self._streams -= 1


def _steps_of(request: Request) -> list[str]:
    """The steps of the parameter `after`, one for each run, equal ones too."""
    words = [word for word in request.query_params.get("after", "").split(",") if word]
    if not all(word.isascii() and word.isdecimal() and len(word) < 19 for word in words):
        raise HTTPException(400, "`after` should be steps with commas between them")
    return words


class _RunTail:
    """Reads what is appended to the journal of rank 0 of one run."""

    def __init__(self, run: str, folder: Path, names: Sequence[str], after: int) -> None:
        self._run, self._folder, self._names, self._after = run, folder, names, after
        self._path: Path | None = None
        self._cursor: JournalCursor | None = None
        self._is_later = False
        """Whether its attempt is a later one than before, and has done no step yet."""

    def read(self) -> dict[str, object] | None:
        """The points since the last call; None if there are none."""
        paths = [file.path for file in journal_files(self._folder) if file.rank == 0]
        if not paths:
            return None
        if self._cursor is None or paths[-1] != self._path:
            self._is_later = self._is_later or self._path is not None
            self._path, self._cursor = paths[-1], JournalCursor(paths[-1])
        with contextlib.suppress(RecordError, ValueError, KeyError, TypeError):
            found = series_of(self._cursor.read())
            # A later attempt does steps again from its first on: curves are to be asked for anew.
            restarted = self._is_later and not all(n.startswith(SYSTEM_PREFIX) for n in found)
            if restarted:
                self._is_later, self._after = False, -1
            points = {
                name: part
                for name in self._names
                if name in found and (part := _points(found[name], self._after))
            }
            if points or restarted:
                return {"id": self._run, "restarted": restarted, "series": points}
        return None


def _points(series: Series, after: int) -> list[list[float | None]]:
    """Steps and values behind a step; of many the last."""
    kept = series.steps > after
    steps, values = series.steps[kept][-_MOST_POINTS:], series.values[kept][-_MOST_POINTS:]
    if not len(steps):
        return []
    known = np.isfinite(values)
    numbers = [float(v) if k else None for v, k in zip(values, known, strict=True)]
    return [steps.tolist(), numbers]


def _event(name: str, value: object) -> str:
    return f"event: {name}\ndata: {json.dumps(value, separators=(',', ':'))}\n\n"
