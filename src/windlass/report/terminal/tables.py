"""Parts of several tables: tables of facts, tables with a title, and a bar."""

from collections.abc import Callable

from rich import box
from rich.bar import Bar
from rich.table import Table

OUTSIDE_STYLE = "bold red"
"""Style of a ratio whose measured number lies outside the predicted interval."""
STATE_COLOURS = {
    "prepared": "blue", "running": "cyan", "finished": "green", "interrupted": "yellow",
    "killed": "yellow", "broken": "red",
}  # fmt: skip
"""Style of each `RunState`."""
_BAR_CELLS = 20


def fact_table() -> Table:
    """An empty table with a column of names and a column of descriptions."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def titled_table(title: str, *columns: str, stays_whole: Callable[[str], bool]) -> Table:
    """An empty table with a bold title.

    Args:
        title: what stands above it.
        columns: names of its columns.
        stays_whole: whether the cells of a column are never wrapped.
    """
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title=title,
        title_justify="left", title_style="bold",
    )  # fmt: skip
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=stays_whole(column))
    return table


def bar(share: float) -> Bar:
    """A bar of block characters that is narrower where a terminal is."""
    return Bar(1.0, 0.0, max(0.0, min(1.0, share)), width=_BAR_CELLS, color="cyan")
