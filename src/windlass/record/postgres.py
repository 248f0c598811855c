"""One catalogue for a team, in PostgreSQL: the same tables, to which every site publishes its runs.

Nothing in it is not in the run folders of a site. Where several sites have copies of one run, the
copy with the longest journals counts, whichever was published first.
"""

import hashlib
import urllib.parse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from windlass.errors import RecordError
from windlass.record.catalog import Catalog
from windlass.record.queries import Progress, RunQueries
from windlass.record.remote import without_secrets
from windlass.record.run_row import COLUMNS
from windlass.record.tables import (
    CURVE_TABLES,
    RUN_TABLES,
    TABLES_VERSION,
    Rows,
    Table,
    create_statement,
    insert_statement,
)

if TYPE_CHECKING:
    import psycopg

_TYPES = {
    "text": 'TEXT COLLATE "C"', "integer": "BIGINT", "real": "DOUBLE PRECISION", "blob": "BYTEA",
}  # fmt: skip
_SOURCES = Table(
    "source",
    {
        "run": "text", "site": "text", "folder": "text", "stamp": "text",
        "journal_bytes": "integer", "changes": "integer", "digest": "text",
    },
    key=3,
)  # fmt: skip
"""Which site has which copy of a run, and how much of it. The copy whose last three columns are the
largest is the one that the other tables show."""
_TABLES = (*RUN_TABLES, *CURVE_TABLES)
_FIELD = {column.name: index for index, column in enumerate(COLUMNS, start=1)}
"""Position of each field in a row of the table `run`, behind its key."""
_SCHEMA_LOCK = 7_203_115
"""Any number of our own: the processes that make the tables wait for each other."""
_CONNECT_SECONDS = 10


class TeamCatalog(RunQueries):
    """The runs of all sites that publish to one database. Close it, or use it as a context manager.

    Args:
        url: `postgresql://user@host/database`; a password is better kept in `~/.pgpass`.

    Raises:
        RecordError: psycopg is missing, the database does not answer, or it has the tables of
            another version.
    """

    def __init__(self, url: str) -> None:
        self._root = Path()
        self._url = url
        self._connection = _connected(url)
        try:
            with self._errors(), self._connection.transaction():
                self._make_tables()
        except RecordError:
            self._connection.close()
            raise

    @property
    def place(self) -> str:
        """The database, without user and password."""
        return f"`{without_secrets(self._url)}`"

    def publish(self, root: Path | str, *, site: str, progress: Progress | None = None) -> int:
        """Publishes the runs under a folder that are new or have changed; returns how many.

        Args:
            site: the name of the place where they are; each folder of runs needs one of its own.

        Raises:
            RecordError: the database does not answer.
            StorageError: the local disk is full.
        """
        with Catalog.open(root) as catalog:
            catalog.refresh(progress)
            published = dict(
                self._fetch("SELECT folder, stamp FROM source WHERE site = ?", (site,))
            )
            stamps = catalog.stamps()
            changed = [name for name, stamp in stamps.items() if published.get(name) != stamp]
            for done, name in enumerate(changed, start=1):
                self._publish_run(_Copy.of(catalog.rows_of_run(name), site, name, stamps[name]))
                if progress is not None:
                    progress("publishing runs", done, len(changed))
            return len(changed)

    def refresh(self, progress: Progress | None = None) -> bool:
        """Does nothing: sites publish what has changed."""
        del progress
        return False

    def unread_folders(self) -> tuple[str, ...]:
        """None: only runs that can be read are published."""
        return ()

    def close(self) -> None:
        """Closes the connection; closing twice is harmless."""
        self._connection.close()

    def _fetch(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        with self._errors():
            return self._connection.execute(_marked(sql), parameters).fetchall()

    _fetch_curves = _fetch

    def _publish_run(self, copy: "_Copy") -> None:
        """Notes one copy of a run, and shows it if no other copy has more."""
        with self._errors(), self._connection.transaction():
            # Two sites that publish the same run wait for each other.
            self._execute("SELECT pg_advisory_xact_lock(hashtextextended(?, 0))", (copy.run,))
            self._execute("DELETE FROM source WHERE site = ? AND folder = ?", copy.source[1:3])
            others = self._fetch(
                "SELECT journal_bytes, changes, digest FROM source WHERE run = ?", (copy.run,)
            )
            self._execute(insert_statement(_SOURCES), copy.source)
            if copy.weight >= max(others, default=copy.weight):
                self._replace(copy)

    def _replace(self, copy: "_Copy") -> None:
        with self._connection.cursor() as cursor:
            for table in _TABLES:
                cursor.execute(_marked(f"DELETE FROM {table.name} WHERE run = ?"), (copy.run,))  # noqa: S608
                if rows := copy.rows.get(table.name):
                    cursor.executemany(insert_statement(table, "%s"), rows)

    def _make_tables(self) -> None:
        self._execute("SELECT pg_advisory_xact_lock(?)", (_SCHEMA_LOCK,))
        self._execute("CREATE SCHEMA IF NOT EXISTS windlass")
        self._execute("CREATE TABLE IF NOT EXISTS version (number INTEGER)")
        versions = self._fetch("SELECT number FROM version")
        if not versions:
            for table in (*_TABLES, _SOURCES):
                self._execute(create_statement(table, _TYPES))
            self._execute("CREATE INDEX setting_key ON setting (key)")
            self._execute("CREATE INDEX series_name ON series (name)")
            self._execute("CREATE INDEX run_id ON run (id)")
            self._execute("INSERT INTO version VALUES (?)", (TABLES_VERSION,))
        elif versions != [(TABLES_VERSION,)]:
            raise RecordError(
                f"{self.place} has the tables of another version of Windlass; let one version "
                "publish there, or drop its schema `windlass` and publish again"
            )

    def _execute(self, sql: str, parameters: Sequence[object] = ()) -> None:
        self._connection.execute(_marked(sql), parameters)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turns an error of the database into one sentence."""
        import psycopg

        try:
            yield
        except psycopg.Error as error:
            raise RecordError(
                f"{self.place} does not do what it should: {_reason(error, self._url)}"
            ) from None


class _Copy(NamedTuple):
    """The copy of a run that a site has."""

    run: str
    """The id of the run, which is its key in the database of a team."""
    weight: tuple[int, int, str]
    source: tuple[object, ...]
    rows: Rows

    @classmethod
    def of(cls, rows: Rows, site: str, folder: str, stamp: str) -> "_Copy":
        """The copy of one run, from its rows in the catalogue of a folder."""
        ((_, *columns),) = rows["run"]
        fields = ["", *columns]
        run = str(fields[_FIELD["id"]])
        fields[_FIELD["site"]] = fields[_FIELD["site"]] or site
        digest = hashlib.sha256(repr(fields).encode()).hexdigest()[:16]
        bytes_, changes = fields[_FIELD["journal_bytes"]], fields[_FIELD["changes"]]
        weight = (int(bytes_ or 0), int(changes or 0), digest)
        rekeyed = {name: [(run, *values[1:]) for values in table] for name, table in rows.items()}
        rekeyed["run"] = [(run, *fields[1:])]
        return cls(run, weight, (run, site, folder, stamp, *weight), rekeyed)


def _connected(url: str) -> "psycopg.Connection[tuple[Any, ...]]":
    try:
        import psycopg
    except ImportError:
        raise RecordError(
            f"`{without_secrets(url)}` needs psycopg; install it with "
            "`pip install 'windlass[postgres]'`"
        ) from None
    try:
        return psycopg.connect(
            url,
            autocommit=True,
            connect_timeout=_CONNECT_SECONDS,
            options="-c search_path=windlass",
            application_name="windlass",
        )
    except psycopg.Error as error:
        raise RecordError(
            f"`{without_secrets(url)}` does not answer: {_reason(error, url)}"
        ) from None


def _reason(error: Exception, url: str) -> str:
    """The last line of an error, if it does not repeat a password."""
    reason = (str(error).strip().splitlines() or ["no reason given"])[-1]
    try:
        parts = urllib.parse.urlsplit(url)
    except ValueError:
        return "the URL is not valid"
    secrets = {parts.password, *urllib.parse.parse_qs(parts.query).get("password", ())}
    secrets |= {urllib.parse.unquote(secret) for secret in secrets if secret}
    hidden = url in reason or any(secret and secret in reason for secret in secrets)
    return "the URL is not valid" if hidden else reason


def _marked(sql: str) -> str:
    """The statement with the marks of psycopg; ours has `?` for parameters only."""
    return sql.replace("?", "%s")
