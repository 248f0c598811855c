"""Parts of several tables: a two-column table of facts, and a bar of block characters."""

from rich.table import Table

OUTSIDE_STYLE = "bold red"
"""Style of a ratio whose measured number lies outside the predicted interval."""
STATE_COLOURS = {
    "prepared": "blue", "running": "cyan", "finished": "green", "interrupted": "yellow",
    "killed": "yellow", "broken": "red",
}  # fmt: skip
"""Style of each `RunState`."""
_BAR_CELLS = 20
_EIGHTHS = " ▏▎▍▌▋▊▉"


def fact_table() -> Table:
    """An empty table with a column of names and a column of descriptions."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def bar(share: float, cells: int = _BAR_CELLS) -> str:
    """A bar of block characters, exact to an eighth of a cell."""
    eighths = round(max(0.0, min(1.0, share)) * cells * 8)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
