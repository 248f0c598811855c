"""What a notebook shows of plans and runs: tables of the terminal, and figures of the pages."""

from base64 import b64encode
from collections.abc import Sequence
from io import StringIO

from rich.console import Console, RenderableType

from windlass.record import RunRow
from windlass.report.figures.svg import standalone
from windlass.report.figures.waterfall import step_time_waterfall
from windlass.report.html.run_figures import loss_figure
from windlass.report.terminal.plan_tables import plan_table, prediction_table
from windlass.report.terminal.run_tables import record_table
from windlass.report.terminal.runs_table import runs_table
from windlass.schema import Graph, Plan, Prediction
from windlass.tracking import RunRecord

_COLUMNS = 110
_TEXT = '<pre style="line-height:1.2;white-space:pre">{code}</pre>'


def plan_notebook(plan: Plan, graph: Graph, prediction: Prediction, *, steps: int) -> str:
    """A plan and its prediction, with the waterfall of its step time."""
    tables = (plan_table(plan, graph), prediction_table(prediction, plan=plan, steps=steps))
    return _html(*tables) + _image(step_time_waterfall(prediction))


def run_notebook(record: RunRecord) -> str:
    """One run beside its prediction, with its losses."""
    figure = loss_figure(record)
    drawing = figure[figure.index("<svg") : figure.index("</svg>") + 6] if record.steps else ""
    return _html(record_table(record)) + (_image(drawing) if drawing else "")


def runs_notebook(runs: Sequence[RunRow], now: float) -> str:
    """A list of runs.

    Args:
        now: seconds since 1970, to show how long ago each run began.
    """
    return _html(runs_table(runs, now))


def _image(svg: str) -> str:
    """A drawing as an image of its own, so that its styles stay inside."""
    content = b64encode(standalone(svg).encode()).decode()
    return f'<img alt="" src="data:image/svg+xml;base64,{content}">'


def _html(*tables: RenderableType) -> str:
    """Tables of the terminal as HTML, in which everything is escaped."""
    console = Console(record=True, width=_COLUMNS, file=StringIO(), force_terminal=True)
    for table in tables:
        console.print(table)
    return console.export_html(inline_styles=True, code_format=_TEXT)
