"""Parts of several tables: tables of facts, tables with a title, and a bar."""

from collections.abc import Callable, Sequence

from rich import box
from rich.bar import Bar
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

OUTSIDE_STYLE = "bold red"
"""Style of a ratio whose measured number lies outside the predicted interval."""
STATE_COLOURS = {
    "prepared": "blue", "running": "cyan", "finished": "green", "interrupted": "yellow",
    "killed": "yellow", "broken": "red",
}  # fmt: skip
"""Style of each `RunState`."""
_BAR_CELLS = 20
_WIDEST = 200
"""More columns than a table takes beyond any that it is cut to."""


def fact_table() -> Table:
    """An empty table with a column of names and a column of descriptions."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def titled_table(title: str, *columns: str, stays_whole: Callable[[str], bool]) -> Table:
    """An empty table with a bold title."""
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title=title,
        title_justify="left", title_style="bold",
    )  # fmt: skip
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=stays_whole(column))
    return table


class NarrowingTable:
    """A table that leaves columns out where there is no room for all, and cuts none.

    Args:
        make: makes the table with some of the columns.
        columns: names of all columns that may be left out.
        least_needed: those of them that are left out, the first first.
        elastic: cells by which columns that are always there may be cut.
    """

    def __init__(
        self,
        make: Callable[[Sequence[str]], Table],
        columns: Sequence[str],
        least_needed: Sequence[str],
        *,
        elastic: int = 0,
    ) -> None:
        self._make, self._columns = make, tuple(columns)
        self._least_needed, self._elastic = least_needed, elastic

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draws the table."""
        yield self._make(self.fitting(console, options))

    def fitting(self, console: Console, options: ConsoleOptions) -> tuple[str, ...]:
        """The columns for which there is room."""
        room, columns = options.max_width + self._elastic, self._columns
        # A table is measured as no wider than its console, so that one must be wide enough.
        wide = options.update(width=room + _WIDEST)
        for name in self._least_needed:
            if console.measure(self._make(columns), options=wide).maximum <= room:
                break
            columns = tuple(column for column in columns if column != name)
        return columns


def bar(share: float) -> Bar:
    """A bar of block characters that is narrower where a terminal is."""
    return Bar(1.0, 0.0, max(0.0, min(1.0, share)), width=_BAR_CELLS, color="cyan")
