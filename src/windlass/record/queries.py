"""Questions to a catalogue, the same for every database that holds one."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from windlass.errors import RecordError, RequestError, is_text, shorten
from windlass.record.filters.filter_sql import Operand, Sql, filter_sql, find_operand, order_sql
from windlass.record.filters.run_filter import parse_filter
from windlass.record.run_row import RunQuery, RunRow
from windlass.record.tables import (
    ROW_COLUMNS,
    SUMMARY_COLUMNS,
    decoded_curve,
    decoded_setting,
    decoded_value,
    run_row,
    series_summary,
)

if TYPE_CHECKING:
    from windlass.record.pyramid import Curve, SeriesSummary

Progress = Callable[[str, int, int | None], None]
"""Called with what is done, how many are done, and of how many; None if that is not known."""
_PEER_INPUTS = ("inputs.graph", "inputs.plan", "inputs.machine")
ALL_RUNS = RunQuery()
"""All runs that are not archived, newest first."""


class RunQueries(ABC):
    """What can be asked of a catalogue.

    A run is named by its id, or by the name of its folder.
    """

    _root: Path
    """The folder that holds the run folders."""

    @property
    @abstractmethod
    def place(self) -> str:
        """Where the catalogue is, for messages; a password is left out."""

    @abstractmethod
    def refresh(self, progress: Progress | None = None) -> bool:
        """Reads the runs that have changed since they were last read; returns whether any had."""

    @abstractmethod
    def unread_folders(self) -> tuple[str, ...]:
        """Names of the folders whose runs have a format that this version does not read."""

    @abstractmethod
    def close(self) -> None:
        """Closes the catalogue; closing twice is harmless."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def _fetch(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """The rows of a query with `?` for each parameter."""

    @abstractmethod
    def _fetch_curves(self, sql: str, parameters: Sequence[object]) -> list[tuple[Any, ...]]:
        """The same for the tables of curves."""

    def rows(self, query: RunQuery = ALL_RUNS) -> list[RunRow]:
        """The runs that a query asks for.

        Raises:
            RequestError: the filter is none.
            InputErrors: the filter has names that no run has, or values of the wrong kind.
        """
        found = self._select(Sql(ROW_COLUMNS), query)
        return [run_row(values, self._root) for values in found]

    def table(self, columns: Sequence[str], query: RunQuery = ALL_RUNS) -> list[tuple[object, ...]]:
        """Some columns of the runs that a query asks for, quicker than their whole rows.

        Args:
            columns: names as in a filter: of a column, a setting, or a series, whose last value it
                then is.

        Raises:
            RequestError: no run has such a column, or the filter is none.
            InputErrors: the filter has names that no run has, or values of the wrong kind.
        """
        operands = [find_operand(name, self) for name in columns]
        sides = [side for one in operands for side in (one.number, one.text) if side is not None]
        if not sides:
            return [() for _ in self._select(Sql("1"), query)]
        parameters = tuple(value for side in sides for value in side.parameters)
        chosen = Sql(", ".join(side.text for side in sides), parameters)
        return [tuple(_values(operands, row)) for row in self._select(chosen, query)]

    def count(self, query: RunQuery = ALL_RUNS) -> int:
        """How many runs a query asks for, without its limit.

        Raises:
            RequestError: the filter is none.
            InputErrors: the filter has names that no run has, or values of the wrong kind.
        """
        where = self._where(query)
        ((count,),) = self._fetch(f"SELECT count(*) FROM run {where.text}", where.parameters)  # noqa: S608
        return int(count)

    def row(self, run: str) -> RunRow:
        """One run.

        Raises:
            RecordError: there is no such run.
        """
        found = self._fetch(f"SELECT {ROW_COLUMNS} FROM run WHERE run = ?", (self._key(run),))  # noqa: S608
        return run_row(found[0], self._root)

    def peers(self, run: str) -> list[RunRow]:
        """The runs of the same graph, plan and machine that nobody marked as broken, newest first.

        The run itself is not among them, nor is one without steps.

        Raises:
            RecordError: there is no such run.
        """
        key = self._key(run)
        marks = ", ".join("?" * len(_PEER_INPUTS))
        found = self._fetch(
            f"SELECT {ROW_COLUMNS} FROM run WHERE run <> ? AND broken = 0 AND step > 0 AND"  # noqa: S608
            " (SELECT count(*) FROM setting AS mine, setting AS own WHERE mine.run = ?"
            "  AND own.run = run.run AND mine.key = own.key AND mine.text = own.text"
            f"  AND mine.key IN ({marks})) = ? ORDER BY id DESC, folder",
            (key, key, *_PEER_INPUTS, len(_PEER_INPUTS)),
        )
        return [run_row(values, self._root) for values in found]

    def series(self, run: str) -> "dict[str, SeriesSummary]":
        """The numbers of all series of a run by name.

        Raises:
            RecordError: there is no such run.
        """
        found = self._fetch(
            f"SELECT name, {SUMMARY_COLUMNS} FROM series WHERE run = ? ORDER BY name",  # noqa: S608
            (self._key(run),),
        )
        return {name: series_summary(values) for name, *values in found}

    def curves(
        self, runs: Sequence[str], names: Sequence[str], points: int = 500
    ) -> "dict[str, dict[str, Curve]]":
        """The curves of some series of some runs, by run and then by name of the series.

        A series that a run does not have is left out.

        Args:
            runs: ids, or names of folders.
            names: names of series, such as `loss`.
            points: most buckets of a curve; the catalogue has at most 500.

        Raises:
            RecordError: there is no such run.
        """
        from windlass.record.pyramid import coarser

        marks = ", ".join("?" * len(names))
        statement = (
            "SELECT curve.name, axis.steps, curve.low, curve.median, curve.high FROM curve"  # noqa: S608
            " JOIN axis ON axis.run = curve.run AND axis.axis = curve.axis"
            f" WHERE curve.run = ? AND curve.name IN ({marks}) ORDER BY curve.name"
        )
        return {
            run: {
                name: coarser(decoded_curve(*blobs), points)
                for name, *blobs in self._fetch_curves(statement, (self._key(run), *names))
            }
            for run in runs
        }

    def knows(self, table: Literal["setting", "series"], name: str) -> bool:
        """Whether a run has a setting or a series of this name."""
        statement = {
            "setting": "SELECT 1 FROM setting WHERE key = ? LIMIT 1",
            "series": "SELECT 1 FROM series WHERE name = ? LIMIT 1",
        }[table]
        return bool(self._fetch(statement, (name,)))

    def names(self) -> Iterable[str]:
        """The names of all settings and of all series."""
        statement = "SELECT key FROM setting UNION SELECT name FROM series ORDER BY 1"
        return (name for (name,) in self._fetch(statement))

    def differing_settings(self, query: RunQuery = ALL_RUNS, most: int = 3) -> tuple[str, ...]:
        """Settings that tell the runs of a group apart, those with the most values first.

        Runs that belong to no group, such as a sweep, are compared with those of their model.

        Args:
            query: which runs; its limit does not count.

        Raises:
            RequestError: the filter is none.
            InputErrors: the filter has names that no run has, or values of the wrong kind.
        """
        where = self._where(query)
        found = self._fetch(
            "SELECT key FROM ("  # noqa: S608  the conditions hold parameters for all values
            "  SELECT setting.key AS key, count(DISTINCT setting.text) AS texts FROM setting"
            f"  JOIN run ON run.run = setting.run {where.text}"
            '  GROUP BY setting.key, coalesce(run."group", run.model)) AS each'
            " WHERE texts > 1 AND key NOT LIKE ? AND key NOT LIKE ?"
            " GROUP BY key ORDER BY max(texts) DESC, key LIMIT ?",
            # Fingerprints of inputs are no choice of anyone's; a comma parts names of columns.
            (*where.parameters, "inputs.%", "%,%", most),
        )
        return tuple(key for (key,) in found)

    def tags(self) -> Mapping[str, int]:
        """All tags, and how many runs have each."""
        return dict(self._fetch("SELECT text, count(*) FROM tag GROUP BY text ORDER BY text"))

    def _key(self, run: str) -> str:
        """What tells a run in the database from others."""
        found = is_text(run) and self._fetch(
            "SELECT run FROM run WHERE id = ? OR folder = ? ORDER BY folder LIMIT 1", (run, run)
        )
        if not found:
            raise RecordError(f"no run `{shorten(run)}` in {self.place}")
        return str(found[0][0])

    def _select(self, chosen: Sql, query: RunQuery) -> list[tuple[Any, ...]]:
        if query.offset < 0 or (query.limit is not None and query.limit < 0):
            raise RequestError(
                f"{query.limit} runs from number {query.offset} on cannot be listed; give a limit "
                "and an offset of 0 or more"
            )
        where, order = self._where(query), order_sql(query.sort, self)
        text = f"SELECT {chosen.text} FROM run {where.text} ORDER BY {order.text}"  # noqa: S608
        parameters = (*chosen.parameters, *where.parameters, *order.parameters)
        if query.limit is not None or query.offset:
            text += " LIMIT ? OFFSET ?"
            parameters += (_NO_LIMIT if query.limit is None else query.limit, query.offset)
        return self._fetch(text, parameters)

    def _where(self, query: RunQuery) -> Sql:
        parts: list[Sql] = []
        if query.archived is not None:
            parts.append(Sql("run.archived = ?", (int(query.archived),)))
        if query.filter is not None and query.filter.strip():
            parts.append(filter_sql(parse_filter(query.filter), self))
        text = " AND ".join(f"({part.text})" for part in parts)
        parameters = tuple(value for part in parts for value in part.parameters)
        return Sql(f"WHERE {text}" if text else "", parameters)


_NO_LIMIT = 2**62


def _values(operands: Sequence[Operand], row: Sequence[Any]) -> Iterator[object]:
    """One value for each operand, from one or two columns each."""
    columns = iter(row)
    for operand in operands:
        number = next(columns) if operand.number is not None else None
        text = next(columns) if operand.text is not None else None
        if operand.unit == "setting":
            yield None if text is None else decoded_setting(text, number)
        else:
            yield decoded_value(text if operand.number is None else number, operand.unit)
