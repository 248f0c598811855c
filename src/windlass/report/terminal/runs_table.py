"""Tables of many runs: the list of runs, and columns that a user chose."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from windlass.record import COLUMNS, RunRow, Setting
from windlass.report.terminal.tables import (
    OUTSIDE_STYLE,
    STATE_COLOURS,
    NarrowingTable,
    fact_table,
)
from windlass.units import format_bytes, format_seconds

_DIFFERENCE_CELLS = 18
_MOST_LINES = 2
"""Lines that what differs may take in a column of the list; what is longer stands below."""
_ABSENT = "–"
_MODEL_CELLS = 8
"""Columns that a model's name keeps where there is little room."""
_PLAN_KEY = "batch.sequence"
"""A setting of every plan."""
_METRIC_CELLS = 16
_NUMBERS = ("step", "loss", "held out", "step time", "ratio", "ago")
_LEAST_NEEDED = ("ratio", "step time", "ago", "held out", "step")
"""Numbers that a narrow terminal leaves out, the first first."""


def runs_table(runs: Sequence[RunRow], now: float) -> RenderableType:
    """One row for each run; a column, or a list where it has no room, says what differs among them.

    Args:
        now: seconds since 1970, to show how long ago each run began.
    """
    return _RunsTable(runs, now)


class _RunsTable:
    """The list of runs as wide as there is room for."""

    def __init__(self, runs: Sequence[RunRow], now: float) -> None:
        self._runs = runs
        self._now = now
        words: dict[str, str] = {}
        # A loop of the user's own has none of the settings of a planned run.
        for is_planned in (True, False):
            alike = [run for run in runs if (_PLAN_KEY in run.settings) == is_planned]
            ids = (run.id for run in alike)
            words |= zip(ids, _differences([run.settings for run in alike]), strict=True)
        self._differences = [", ".join(filter(None, (*_marks(run), words[run.id]))) for run in runs]
        self._longest_model = max((len(run.model) for run in runs), default=0)
        self._narrowing = NarrowingTable(
            self._table, _NUMBERS, _LEAST_NEEDED, elastic=max(0, self._longest_model - _MODEL_CELLS)
        )

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draws the table."""
        numbers = self._narrowing.fitting(console, options)
        # A table is measured as no wider than its console.
        wide = options.update(width=options.max_width + self._longest_model)
        excess = console.measure(self._table(numbers), options=wide).maximum - options.max_width
        cells = max(_MODEL_CELLS, self._longest_model - max(0, excess))
        table = self._table(numbers, cells)
        room = options.max_width - console.measure(table).maximum
        longest = max(map(len, self._differences), default=0)
        is_wide = room >= max(_DIFFERENCE_CELLS, longest / _MOST_LINES)
        yield self._table(numbers, cells, with_differences=True) if is_wide and longest else table
        if longest and not is_wide:
            below = fact_table()
            for run, words in zip(self._runs, self._differences, strict=True):
                below.add_row(run.short_id, Text(words or "–"))
            yield Text("what differs", style="bold")
            yield below

    def _table(
        self,
        numbers: Sequence[str],
        model_cells: int | None = None,
        *,
        with_differences: bool = False,
    ) -> Table:
        """The table with some of the numbers, and models in so many cells; None cuts none."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("run", no_wrap=True)
        table.add_column("model", no_wrap=True)
        table.add_column("state", no_wrap=True)
        for name in numbers:
            table.add_column(name, justify="right", no_wrap=True)
        if with_differences:
            table.add_column("what differs", overflow="fold", min_width=_DIFFERENCE_CELLS)
        for run, words in zip(self._runs, self._differences, strict=True):
            cells = self._cells(run)
            table.add_row(
                run.short_id, Text(_cut(run.model, model_cells or self._longest_model)),
                Text(run.state, style=STATE_COLOURS[run.state]),
                *(cells[name] for name in numbers), *([Text(words)] if with_differences else []),
            )  # fmt: skip
        return table

    def _cells(self, run: RunRow) -> dict[str, str | Text]:
        """Each of the numbers of a run."""
        ratio = _ABSENT if run.ratio is None else f"{run.ratio:.2f} ×"
        return {
            "step": f"{run.step}/{run.steps}" if run.steps else str(run.step),
            "loss": _main_value(run) if run.step else _ABSENT,
            "held out": _ABSENT if run.held_out_loss is None else _loss(run.held_out_loss),
            "step time": _ABSENT if run.seconds is None else format_seconds(run.seconds),
            "ratio": Text(ratio, style=OUTSIDE_STYLE if run.outside_interval else ""),
            "ago": _ABSENT if run.started is None else _ago(self._now - run.started),
        }


def _cut(model: str, cells: int) -> str:
    """A name in so many cells: the end of a path, and the beginning of another name."""
    if len(model) <= cells:
        return model
    return f"…{model[1 - cells :]}" if "/" in model else f"{model[: cells - 1]}…"


def _marks(run: RunRow) -> Iterator[str]:
    """What people and verdicts say of a run, in short words; first the name that it was given."""
    if not run.name.endswith(run.short_id):
        yield run.name
    if run.verdict in ("slow", "broken"):
        yield f"verdict {run.verdict}"
    if run.broken:
        yield "marked broken"
    if run.archived:
        yield "archived"
    if run.faults:
        yield f"{len(run.faults)} fault{'s' if len(run.faults) > 1 else ''}"
    yield from (f"#{tag}" for tag in run.tags)
    if run.parent:
        yield f"from {run.parent}"


def _main_value(run: RunRow) -> str:
    """The last loss, or the name and last value of what a loop without one logs first."""
    if run.metric is None:
        return _ABSENT
    name = "" if run.metric == "loss" else f"{_cut(run.metric, _METRIC_CELLS)} "
    return name + _loss(run.metric_value)


def _loss(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.3f}"


def _differences(settings: Sequence[Mapping[str, Setting]]) -> list[str]:
    """For each run its values that most of the runs do not have, in short words."""
    keys = dict.fromkeys(key for one in settings for key in one)
    usual = {key: Counter(one.get(key) for one in settings).most_common(1)[0][0] for key in keys}
    different = [key for key in keys if any(one.get(key) != usual[key] for one in settings)]
    names = Counter(key.rpartition(".")[2] for key in different)
    short = {
        key: key.rpartition(".")[2] if names[key.rpartition(".")[2]] == 1 else key
        for key in different
    }
    return [
        ", ".join(
            f"{short[key]}={_shown(one[key], '')}" if key in one else f"no {short[key]}"
            for key in different
            if one.get(key) != usual[key]
        )
        for one in settings
    ]


def columns_table(names: Sequence[str], rows: Sequence[Sequence[object]]) -> RenderableType:
    """Columns that a user chose, one row for each run.

    Args:
        names: columns, settings and series, as in a filter.
        rows: a value for each of them; None where a run lacks it.
    """
    units = {column.name: column.unit for column in COLUMNS}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for index, name in enumerate(names):
        is_text = all(isinstance(row[index], str | None) for row in rows)
        table.add_column(name, justify="left" if is_text else "right", overflow="fold")
    for row in rows:
        cells = zip(names, row, strict=True)
        table.add_row(*(Text(_shown(value, units.get(name, ""))) for name, value in cells))
    return table


def _shown(value: object, unit: str) -> str:
    """One value in the words of its unit."""
    if value is None:
        return _ABSENT
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_shown(one, '')}" for key, one in value.items())
    if isinstance(value, bool | str):
        return str(value).lower() if isinstance(value, bool) else str(value)
    number = float(value)  # type: ignore[arg-type]  # all other values are numbers
    if unit == "time":
        return f"{datetime.fromtimestamp(number, tz=UTC):%Y-%m-%d %H:%M}"
    formats = {"seconds": format_seconds, "bytes": format_bytes}
    return formats[unit](number) if unit in formats else f"{number:.6g}"


def _ago(seconds: float) -> str:
    """`3 h`: whole units, for a narrow column."""
    if not math.isfinite(seconds):
        return "–"
    for size, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {name}"
    return f"{max(0, int(seconds))} s"
