"""Draws documents and records: tables and live display for a terminal, and one-file pages."""

from windlass.report.live import TrainingView
from windlass.report.machine import machine_table, machines_table, numbers_table
from windlass.report.page import page
from windlass.report.table import (
    plan_table,
    prediction_table,
    record_table,
    runners_up_table,
    runs_table,
)
from windlass.report.timeline import picture
from windlass.report.words import plan_words

__all__ = [
    "TrainingView",
    "machine_table",
    "machines_table",
    "numbers_table",
    "page",
    "picture",
    "plan_table",
    "plan_words",
    "prediction_table",
    "record_table",
    "runners_up_table",
    "runs_table",
]
