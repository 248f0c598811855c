"""Draws plans, predictions and runs: terminal tables, SVG figures, HTML pages, Perfetto traces."""

from windlass.report.formatting import describe_plan
from windlass.report.html.run_page import run_page
from windlass.report.perfetto_trace import perfetto_trace
from windlass.report.terminal.live_view import TrainingView
from windlass.report.terminal.machine_tables import machine_table, machines_table, numbers_table
from windlass.report.terminal.plan_tables import plan_table, prediction_table, runners_up_table
from windlass.report.terminal.run_tables import record_table, runs_table

__all__ = [
    "TrainingView",
    "describe_plan",
    "machine_table",
    "machines_table",
    "numbers_table",
    "perfetto_trace",
    "plan_table",
    "prediction_table",
    "record_table",
    "run_page",
    "runners_up_table",
    "runs_table",
]
