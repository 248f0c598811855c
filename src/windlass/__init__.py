"""Windlass: train a large model on whatever machine you have.

The commands of the command line are functions here, and return values instead of text:

    planned = windlass.plan("gpt-tiny")
    for step in windlass.train(planned):
        print(step.step, step.loss)
"""

from windlass.api import (
    Planned,
    Run,
    capture,
    find_machine,
    largest_model,
    load,
    make_request,
    measure_largest_model,
    plan,
    probe,
    report,
    resume,
    runs,
    sample,
    train,
)
from windlass.errors import WindlassError

__all__ = [
    "Planned",
    "Run",
    "WindlassError",
    "capture",
    "find_machine",
    "largest_model",
    "load",
    "make_request",
    "measure_largest_model",
    "plan",
    "probe",
    "report",
    "resume",
    "runs",
    "sample",
    "train",
]
__version__ = "0.1.0"
