"""Searches settings with many runs that are packed on one machine."""

from windlass.sweep.driver import Driver, SweepStatus, Workplace, most_jobs, read_trials
from windlass.sweep.jobs import make_jobs
from windlass.sweep.search_space import Dimension, end_points, grid_points, is_range_or_choices
from windlass.sweep.sweep_file import (
    ARM, SWEEPS_FOLDER, SweepFolder, SweepRequest, Trial, sweep_names,
)  # fmt: skip
from windlass.sweep.run_values import best_trials, importance, ranked_trials

__all__ = [
    "ARM", "SWEEPS_FOLDER", "Dimension", "Driver", "SweepFolder", "SweepRequest", "SweepStatus",
    "Trial", "Workplace", "best_trials", "end_points", "grid_points", "importance",
    "is_range_or_choices", "make_jobs", "most_jobs", "ranked_trials", "read_trials", "sweep_names",
]  # fmt: skip
