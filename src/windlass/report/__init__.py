"""Draws plans, predictions and runs: terminal tables, SVG figures, HTML pages, Perfetto traces."""

from windlass.report.figures.comparison import (
    batch_comparison_figure,
    machine_comparison_figure,
)
from windlass.report.figures.figure_sheet import (
    PLAN_FIGURES,
    figure_sheet,
)
from windlass.report.figures.png import (
    write_png,
)
from windlass.report.figures.smallest_machine import (
    smallest_machine_figure,
)
from windlass.report.figures.svg import (
    svg_size,
)
from windlass.report.formatting import (
    describe_phases,
    describe_plan,
    describe_traffic,
)
from windlass.report.html.notebook import (
    plan_notebook,
    run_notebook,
    runs_notebook,
)
from windlass.report.html.plan_page import (
    plan_page,
)
from windlass.report.html.run_diff_page import (
    run_diff_page,
)
from windlass.report.html.run_page import (
    run_page,
)
from windlass.report.perfetto import (
    perfetto_trace,
)
from windlass.report.plan_forecast import (
    PlanForecast,
)
from windlass.report.terminal.comparison_tables import (
    batch_comparison_table,
    infeasible_lines,
    machine_comparison_table,
    smallest_machine_table,
)
from windlass.report.terminal.data_table import (
    data_table,
)
from windlass.report.terminal.largest_model_table import (
    largest_model_table,
)
from windlass.report.terminal.live_view import (
    TrainingView,
)
from windlass.report.terminal.machine_tables import (
    machine_table,
    machines_table,
    numbers_table,
)
from windlass.report.terminal.plan_tables import (
    memory_table,
    plan_table,
    prediction_table,
    runners_up_table,
)
from windlass.report.terminal.run_diff_table import (
    run_diff_table,
)
from windlass.report.terminal.run_tables import (
    record_table,
    runs_table,
)
from windlass.report.terminal.stack_tables import (
    stack_table,
    stacks_table,
)
from windlass.report.terminal.verification_table import (
    InjectedFaultRow,
    describe_verdict,
    injected_faults_table,
    verification_table,
)

__all__ = [
    "PLAN_FIGURES",
    "InjectedFaultRow",
    "PlanForecast",
    "TrainingView",
    "batch_comparison_figure",
    "batch_comparison_table",
    "data_table",
    "describe_phases",
    "describe_plan",
    "describe_traffic",
    "describe_verdict",
    "figure_sheet",
    "infeasible_lines",
    "injected_faults_table",
    "largest_model_table",
    "machine_comparison_figure",
    "machine_comparison_table",
    "machine_table",
    "machines_table",
    "memory_table",
    "numbers_table",
    "perfetto_trace",
    "plan_notebook",
    "plan_page",
    "plan_table",
    "prediction_table",
    "record_table",
    "run_diff_page",
    "run_diff_table",
    "run_notebook",
    "run_page",
    "runners_up_table",
    "runs_notebook",
    "runs_table",
    "smallest_machine_figure",
    "smallest_machine_table",
    "stack_table",
    "stacks_table",
    "svg_size",
    "verification_table",
    "write_png",
]
