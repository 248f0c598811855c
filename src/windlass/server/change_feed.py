"""Keeps the catalogue fresh while somebody looks at it, and remembers which runs have changed."""

import sqlite3
import threading
import time
from typing import NamedTuple, Self

from windlass.errors import WindlassError
from windlass.record import Catalog, RunQuery

_LOOKED_SECONDS = 30.0
"""A catalogue that nobody has asked for so long is left alone: refreshing it takes time from a
training on the same machine."""
_PAUSE_SECONDS, _PAUSE_FACTOR = 1.0, 20.0
"""Shortest pause between two refreshes, and the pause in durations of a refresh."""
_WATCHED = (
    "id", "name", "state", "step", "ended", "attempts", "verdict", "tags", "notes", "archived",
    "broken", "faults",
)  # fmt: skip


class Changes(NamedTuple):
    """Which runs have changed since a version of the table of runs."""

    version: int
    """The version now."""
    runs: tuple[str, ...]
    """Their ids; one that is no longer there is among them."""


class ChangeFeed:
    """Refreshes a catalogue in a thread of its own. Close it, or use it as a context manager."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._mutex = threading.Lock()
        self._looked = threading.Event()
        self._last_look = time.monotonic()
        self._rows: dict[str, tuple[object, ...]] = {}
        self._versions: dict[str, int] = {}
        self.version = time.time_ns() // 10**6
        """Begins at the time, so that a page of an earlier server hears of all runs."""
        self.fault: str | None = None
        """Why the last refresh failed; None if it did not."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="change feed", daemon=True)

    def __enter__(self) -> Self:
        self.refresh()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._looked.set()
        self._thread.join()

    def look(self) -> None:
        """Notes that somebody looks at the runs now."""
        self._last_look = time.monotonic()
        self._looked.set()

    def refresh(self) -> None:
        """Reads what has changed, right now."""
        try:
            self._catalog.refresh()
            rows = {str(row[0]): row[1:] for row in self._catalog.table(_WATCHED, _ALL)}
            self.fault = None
        except (WindlassError, OSError, sqlite3.Error) as error:
            self.fault = str(error)
            return
        with self._mutex:
            changed = {run for run in rows.keys() | self._rows.keys() if self._is_new(run, rows)}
            if changed:
                self.version += 1
                self._versions |= dict.fromkeys(changed, self.version)
            self._rows = rows

    def changes(self, since: int) -> Changes:
        """The runs that have changed after a version."""
        with self._mutex:
            if since >= self.version:
                return Changes(self.version, ())
            runs = (run for run, version in self._versions.items() if version > since)
            return Changes(self.version, tuple(sorted(runs)))

    def _is_new(self, run: str, rows: dict[str, tuple[object, ...]]) -> bool:
        return rows.get(run) != self._rows.get(run)

    def _follow(self) -> None:
        while not self._closed.is_set():
            began = time.monotonic()
            self.refresh()
            self._closed.wait(max(_PAUSE_SECONDS, _PAUSE_FACTOR * (time.monotonic() - began)))
            if self._is_left_alone():
                self._looked.clear()
                # Asked again: whoever looks or closes notes it first, and then sets the event.
                if self._is_left_alone():
                    self._looked.wait()

    def _is_left_alone(self) -> bool:
        is_asked = time.monotonic() - self._last_look <= _LOOKED_SECONDS
        return not is_asked and not self._closed.is_set()


_ALL = RunQuery(archived=None)
