from .figures.comparison import batch_comparison_figure, machine_comparison_figure
from .figures.dataflow import dataflow_figure, machines_curves_figure
from .figures.figure_sheet import PLAN_FIGURES, figure_sheet
from .figures.smallest_machine import smallest_machine_figure
from .figures.svg import PALETTE_CSS, kind_colour, svg_size, write_png
from .figures.sweep_figure import SweepAxis, SweepLine, sweep_figure
from .formatting import (
    describe_plan, describe_speedup, describe_stack, describe_traffic, parallel_degrees,
)  # fmt: skip
from .html.arms_page import (
    ArmFacts, ArmScore, ArmsReport, arms_page, cost_table, loss_table, score_table,
)  # fmt: skip
from .html.notebook import plan_notebook, run_notebook, runs_notebook
from .html.plan_page import plan_page
from .html.run_page import run_diff_page, run_page
from .perfetto import perfetto_trace
from .plan_forecast import PlanForecast
from .predicted_vs_measured import most_memory_bytes
from .run_differences import describe_sigmas, input_line
from .terminal.comparison_tables import (
    batch_comparison_table, infeasible_lines, machine_comparison_table, smallest_machine_table,
)  # fmt: skip
from .terminal.data_table import data_table
from .terminal.dataflow_tables import (
    dataflow_table, describe_dataflow, describe_thresholds, machines_dataflow_table, section_table,
    sparsity_table,
)  # fmt: skip
from .terminal.run_tables import expert_table, record_table, run_diff_table
from .terminal.plan_tables import (
    largest_model_table, memory_table, plan_table, prediction_table, runners_up_table,
)  # fmt: skip
from .terminal.live_view import TrainingView
from .terminal.machine_tables import (
    MachinesTable, StacksTable, machine_table, numbers_table, stack_table,
)  # fmt: skip
from .terminal.runs_table import columns_table, runs_table
from .terminal.sweep_table import SweepRows, TrialRow, sweep_line, sweep_table, trial_line
from .terminal.tables import fact_table
from .terminal.verification_table import (
    InjectedFaultRow, describe_verdict, injected_faults_table, verification_table,
)  # fmt: skip

__all__ = [
    "PALETTE_CSS",
    "PLAN_FIGURES",
    "ArmFacts",
    "ArmScore",
    "ArmsReport",
    "InjectedFaultRow",
    "MachinesTable",
    "PlanForecast",
    "StacksTable",
    "SweepAxis",
    "SweepLine",
    "SweepRows",
    "TrainingView",
    "TrialRow",
    "arms_page",
    "batch_comparison_figure",
    "batch_comparison_table",
    "columns_table",
    "cost_table",
    "data_table",
    "dataflow_figure",
    "dataflow_table",
    "describe_dataflow",
    "describe_plan",
    "describe_sigmas",
    "describe_speedup",
    "describe_stack",
    "describe_thresholds",
    "describe_traffic",
    "describe_verdict",
    "expert_table",
    "fact_table",
    "figure_sheet",
    "infeasible_lines",
    "injected_faults_table",
    "input_line",
    "kind_colour",
    "largest_model_table",
    "loss_table",
    "machine_comparison_figure",
    "machine_comparison_table",
    "machine_table",
    "machines_curves_figure",
    "machines_dataflow_table",
    "memory_table",
    "most_memory_bytes",
    "numbers_table",
    "parallel_degrees",
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
    "score_table",
    "section_table",
    "smallest_machine_figure",
    "smallest_machine_table",
    "sparsity_table",
    "stack_table",
    "svg_size",
    "sweep_figure",
    "sweep_line",
    "sweep_table",
    "trial_line",
    "verification_table",
    "write_png",
]  # fmt: skip
