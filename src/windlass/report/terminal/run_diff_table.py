"""What differs between runs, as tables on a terminal."""

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from windlass.judge import RunDiff
from windlass.report.run_differences import input_line, key_rows, result_rows


def run_diff_table(found: RunDiff) -> RenderableType:
    """One sentence on the inputs, the keys that differ, and the results beside the noise floor."""
    names = [run.short_id for run in found.runs]
    parts: list[RenderableType] = [Text(f"{input_line(found)}.", style="bold")]
    keys = list(key_rows(found))
    if keys:
        parts.append(_table(("input", "key", *names), keys))
    results = list(result_rows(found))
    if results:
        parts.append(_table(("result", *names, f"{names[-1]} beside {names[0]}"), results))
    return Group(*parts)


def _table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for head in heads:
        table.add_column(head, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
