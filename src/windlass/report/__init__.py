"""Draws documents and records: tables and live display for a terminal, and one-file pages."""

from windlass.report.figures.timeline import picture
from windlass.report.formatting import describe_plan
from windlass.report.html.run_page import run_page
from windlass.report.terminal.live_view import TrainingView
from windlass.report.terminal.machine_tables import machine_table, machines_table, numbers_table
from windlass.report.terminal.tables import (
    plan_table,
    prediction_table,
    record_table,
    runners_up_table,
    runs_table,
)

__all__ = [
    "TrainingView",
    "machine_table",
    "machines_table",
    "numbers_table",
    "run_page",
    "picture",
    "plan_table",
    "describe_plan",
    "prediction_table",
    "record_table",
    "runners_up_table",
    "runs_table",
]
