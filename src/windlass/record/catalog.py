"""The catalogue of a folder of runs: SQLite files that can be thrown away at any time.

`.catalog.sqlite` holds what is known of the runs. It is read and written whole, and equal run
folders give equal bytes, in whatever order they came. `.curves.sqlite` holds their pyramids, and
the state of the files that each run was read from, which differs from machine to machine.
"""

import contextlib
import hashlib
import os
import re
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from windlass.atomic_files import cache_folder, file_state
from windlass.errors import RecordError, StorageError
from windlass.record.queries import Progress, RunQueries
from windlass.record.run_files import run_stamps
from windlass.record.tables import (
    CURVE_TABLES,
    RUN_TABLES,
    TABLES_VERSION,
    Rows,
    Table,
    create_statement,
    insert_statement,
    rows_of,
)
from windlass.tracking import LOCK_FILE, is_locked

RUNS = Path("runs")
"""The folder that holds the run folders, unless a caller names another one."""
CATALOG_FILE, CURVES_FILE = ".catalog.sqlite", ".curves.sqlite"
_TYPES = {"text": "TEXT", "integer": "INTEGER", "real": "REAL", "blob": "BLOB"}
_WAIT_SECONDS = 120.0
"""How long one process waits for another one that refreshes the same catalogue."""
_SAVE_SECONDS = 5.0
"""A process that refreshes again and again writes the file of runs this rarely."""
_UNKNOWN = "unknown"
_STAMPS = Table("stamp", {"folder": "text", "stamp": "text"}, key=1)
_SAVED = Table("saved", {"file": "text", "state": "text"}, key=1)


class Catalog(RunQueries):
    """The runs under a folder. `open` makes one; close it, or use it as a context manager.

    Several threads may ask it at once, also while one of them refreshes it: what reads run folders
    holds `_refreshing`, and `_mutex` only while it changes the tables. A thread that needs both
    takes `_refreshing` first.
    """

    def __init__(self, root: Path, files: Path | None) -> None:
        self._root = root
        self._files = files
        self._refreshing, self._mutex = threading.RLock(), threading.RLock()
        self._stamps: dict[str, str] = {}
        self._unsaved: set[str] = set()
        self._saved_at = -_SAVE_SECONDS
        self._loaded = _UNKNOWN
        try:
            self._connect_and_load()
        except sqlite3.DatabaseError as error:
            self._start_anew(error)

    @classmethod
    def open(cls, root: Path | str) -> "Catalog":
        """The catalogue of the runs under a folder, as it was last saved: `refresh` reads the rest.

        A folder that cannot be written has its catalogue in the user's cache; where the disk is
        full it is in memory only.

        Raises:
            RecordError: `root` is a file.
        """
        root = Path(root)
        if root.exists() and not root.is_dir():
            raise RecordError(f"`{root}` is no folder of runs")
        files = _folder_of_files(root)
        return cls(root, files)

    @property
    def place(self) -> str:
        """The folder of runs."""
        return f"`{self._root}`"

    def refresh(self, progress: Progress | None = None) -> bool:
        """Reads the runs that have changed since they were last read; returns whether any had."""
        with self._refreshing:
            try:
                return self._refresh(progress)
            except (sqlite3.DatabaseError, StorageError) as error:
                with self._mutex:
                    self._start_anew(error)
                return self._refresh(progress)

    def unread_folders(self) -> tuple[str, ...]:
        """Names of the folders whose runs have a format that this version does not read."""
        with self._mutex:
            return tuple(sorted(self._stamps.keys() - self.stamps().keys()))

    def stamps(self) -> dict[str, str]:
        """What each run was read from and its state, by the name of its folder."""
        with self._mutex:
            states = self._fetch("SELECT run, state FROM run ORDER BY run")
            return {run: f"{self._stamps[run]} {state}" for run, state in states}

    def rows_of_run(self, folder: str) -> Rows:
        """All rows of one run, by table."""
        with self._refreshing, self._mutex:
            fetched = ((self._fetch, RUN_TABLES), (self._fetch_curves, CURVE_TABLES))
            return {
                table.name: fetch(f"SELECT * FROM {table.name} WHERE run = ?", (folder,))  # noqa: S608
                for fetch, tables in fetched
                for table in tables
            }

    def save(self) -> None:
        """Writes what was read since the last time."""
        with self._refreshing, self._mutex, self._transaction():
            if self._loaded != self._file_state():
                self._loaded = _UNKNOWN  # another process has saved since: read what it wrote
            elif self._files is not None and self._unsaved:
                path = self._files / CATALOG_FILE
                # Only one process saves at a time; one that was killed may have left its file.
                temporary = path.with_name(f"{path.name}.tmp")
                temporary.unlink(missing_ok=True)
                self.write_copy(temporary)
                temporary.replace(path)
                self._note_saved()
            self._unsaved.clear()
            self._saved_at = time.monotonic()

    def write_copy(self, path: Path) -> None:
        """Writes what is known of the runs to a new SQLite file; equal runs give equal bytes.

        Raises:
            StorageError: the file exists, or the disk is full.
        """
        with self._refreshing, self._mutex:
            # It counts changes of the tables, and stands in the file.
            self._runs.execute("PRAGMA schema_version = 1")
            try:
                self._runs.execute("VACUUM INTO ?", (str(path),))
            except sqlite3.OperationalError as error:
                raise StorageError(f"`{path}` cannot be written: {error}") from error

    def close(self) -> None:
        """Saves the catalogue, if the disk has room for it, and closes it."""
        with contextlib.suppress(sqlite3.Error, StorageError):
            self.save()
        self._runs.close()
        self._curves.close()

    def _fetch(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        with self._mutex:
            return self._runs.execute(sql, parameters).fetchall()

    def _fetch_curves(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        try:
            with self._mutex:
                return self._curves.execute(sql, parameters).fetchall()
        except sqlite3.DatabaseError as error:
            with self._refreshing, self._mutex:
                self._start_anew(error)
                self._refresh(None)
                return self._curves.execute(sql, parameters).fetchall()

    def _connect_and_load(self) -> None:
        self._runs = _connect(":memory:")
        path = ":memory:" if self._files is None else str(self._files / CURVES_FILE)
        self._curves = _connect(path)
        with self._transaction():
            (version,) = self._curves.execute("PRAGMA user_version").fetchone()
            if version != TABLES_VERSION:
                for table in (*CURVE_TABLES, _STAMPS, _SAVED):
                    self._curves.execute(f"DROP TABLE IF EXISTS {table.name}")
                    self._curves.execute(create_statement(table, _TYPES, " WITHOUT ROWID"))
                self._curves.execute(f"PRAGMA user_version = {TABLES_VERSION}")
            self._load()

    def _start_anew(self, error: Exception) -> None:
        """Goes on without what the files hold, which is in the run folders, too.

        Args:
            error: what is wrong with them.
        """
        if self._files is None:
            raise error
        self._curves.close()
        if isinstance(error, sqlite3.OperationalError | StorageError):
            self._files = None  # the disk is full, or another process does not end
        else:
            for name in (CATALOG_FILE, CURVES_FILE):
                (self._files / name).unlink(missing_ok=True)
        self._connect_and_load()

    def _refresh(self, progress: Progress | None) -> bool:
        stamps = run_stamps(self._root)
        changed = stamps != self._stamps
        if changed or self._loaded != self._file_state():
            with self._transaction():
                if self._loaded != self._file_state():
                    with self._mutex:
                        self._load()
                changed = self._read_changed(stamps, progress) or changed
        changed = self._update_states() or changed
        if self._unsaved and time.monotonic() - self._saved_at > _SAVE_SECONDS:
            self.save()
        return changed

    def _load(self) -> None:
        """Reads both files; where they do not belong together, every run counts as new."""
        state = self._file_state()
        saved = self._curves.execute("SELECT state FROM saved").fetchall()
        self._unsaved.clear()
        self._runs.close()
        self._runs = _connect(":memory:")
        self._loaded = state
        if state and self._files is not None and saved == [(state,)]:
            self._runs.deserialize((self._files / CATALOG_FILE).read_bytes())
            self._stamps = dict(self._curves.execute("SELECT folder, stamp FROM stamp"))
            return
        for table in RUN_TABLES:
            self._runs.execute(create_statement(table, _TYPES, " WITHOUT ROWID"))
        self._runs.execute("CREATE INDEX setting_key ON setting (key)")
        self._runs.execute("CREATE INDEX series_name ON series (name)")
        for table in (*CURVE_TABLES, _STAMPS):
            self._curves.execute(f"DELETE FROM {table.name}")  # noqa: S608  our own names
        self._stamps = {}

    def _read_changed(self, stamps: dict[str, str], progress: Progress | None) -> bool:
        """Reads the runs whose state is another one than was noted; returns whether any was."""
        gone = sorted(self._stamps.keys() - stamps.keys())
        changed = [name for name, stamp in stamps.items() if self._stamps.get(name) != stamp]
        with self._mutex:
            self._runs.execute("BEGIN")
            for name in gone:
                self._replace(name, {})
                del self._stamps[name]
        for done, name in enumerate(changed, start=1):
            rows = _read_rows(self._root / name)
            with self._mutex:
                self._replace(name, rows)
                self._stamps[name] = stamps[name]
            if progress is not None:
                progress("reading runs", done, len(changed))
        self._runs.execute("COMMIT")
        return bool(gone or changed)

    def _replace(self, name: str, rows: Rows) -> None:
        """Puts the rows of one run into the place of its old ones."""
        self._unsaved.add(name)
        self._curves.execute("DELETE FROM stamp WHERE folder = ?", (name,))
        for database, tables in ((self._runs, RUN_TABLES), (self._curves, CURVE_TABLES)):
            for table in tables:
                database.execute(f"DELETE FROM {table.name} WHERE run = ?", (name,))  # noqa: S608
                database.executemany(insert_statement(table), rows.get(table.name, ()))

    def _update_states(self) -> bool:
        """Tells runs that are going on from those that were killed; returns whether any changed."""
        going = self._fetch("SELECT run, state FROM run WHERE state IN ('killed', 'running')")
        states = {
            name: "running" if is_locked(self._root / name / LOCK_FILE) else "killed"
            for name, _ in going
        }
        changed = [(states[name], name) for name, state in going if states[name] != state]
        with self._mutex:
            self._runs.executemany("UPDATE run SET state = ? WHERE run = ?", changed)
        self._unsaved |= {name for _, name in changed}
        return bool(changed)

    def _note_saved(self) -> None:
        self._loaded = self._file_state()
        self._curves.execute("DELETE FROM saved")
        self._curves.execute(insert_statement(_SAVED), (CATALOG_FILE, self._loaded))
        stamps = [(name, self._stamps[name]) for name in self._unsaved & self._stamps.keys()]
        self._curves.executemany("DELETE FROM stamp WHERE folder = ?", [(n,) for n, _ in stamps])
        self._curves.executemany(insert_statement(_STAMPS), stamps)

    def _file_state(self) -> str:
        """The state of the file of runs; empty if there is none."""
        with contextlib.suppress(OSError):
            if self._files is not None:
                return repr(file_state(self._files / CATALOG_FILE))
        return ""

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """Keeps other processes from refreshing the same catalogue; undone after an exception."""
        if self._curves.in_transaction:
            yield
            return
        self._curves.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            if self._curves.in_transaction:
                self._curves.execute("ROLLBACK")
            self._unsaved.clear()
            self._loaded = _UNKNOWN  # the next refresh reads both files again
            raise
        self._curves.execute("COMMIT")


def _connect(path: str) -> sqlite3.Connection:
    """A connection that commits each statement, unless a transaction was begun."""
    connection = sqlite3.connect(
        path, timeout=_WAIT_SECONDS, isolation_level=None, check_same_thread=False
    )
    connection.create_function("like", 2, _is_like, deterministic=True)
    return connection


def _is_like(pattern: str | None, text: str | None) -> bool | None:
    """SQL's `text LIKE pattern` as PostgreSQL has it, which tells capital letters from others."""
    if pattern is None or text is None:
        return None
    return _like_expression(pattern).fullmatch(text) is not None


@lru_cache(maxsize=100)
def _like_expression(pattern: str) -> re.Pattern[str]:
    """`%` stands for any text, `_` for one character, and a backslash takes their meaning away."""
    parts = re.findall(r"\\.|.", pattern, re.DOTALL)
    signs = {"%": ".*", "_": "."}
    return re.compile("".join(signs.get(p, re.escape(p[-1])) for p in parts), re.DOTALL)


def _read_rows(folder: Path) -> Rows:
    """The rows of one run; none if it is of another format."""
    from windlass.record.run_entry import read_run_entry

    try:
        return rows_of(folder.name, read_run_entry(folder))
    except (RecordError, OSError):
        return {}


def _folder_of_files(root: Path) -> Path | None:
    """Where the files of a catalogue are; None if there is no folder of runs."""
    if not root.is_dir():
        return None
    if os.access(root, os.W_OK):
        return root
    digest = hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:16]
    folder = cache_folder() / "catalogs" / digest
    folder.mkdir(parents=True, exist_ok=True)
    return folder
