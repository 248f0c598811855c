"""The verbs: joins the rooms below into what a user calls. No numbers of its own, only calls."""

from windlass.api.across import ALL, batches, compared
from windlass.api.biggest import largest, record, require_here
from windlass.api.check import Caught, Checking, proving
from windlass.api.cluster import prepare
from windlass.api.device import as_device
from windlass.api.machines import machines
from windlass.api.needed import needed
from windlass.api.pictures import draw, draw_alone, forecast, require_drawable
from windlass.api.plan import HERE, Planned, Progress, ask, capture, find_machine, plan, probe
from windlass.api.record import RUNS, load, report, runs
from windlass.api.rehearse import PROCESSES, as_it_is, in_small, load_plan, to_rehearse
from windlass.api.resume import resume, sample
from windlass.api.run import Run, train
from windlass.api.scrutiny import Scrutiny
from windlass.api.survive import Survival
from windlass.api.worker import Worker, as_worker, guard

__all__ = [
    "ALL",
    "HERE",
    "PROCESSES",
    "RUNS",
    "Caught",
    "Checking",
    "Planned",
    "Progress",
    "Run",
    "Scrutiny",
    "Survival",
    "Worker",
    "as_device",
    "as_it_is",
    "as_worker",
    "ask",
    "batches",
    "capture",
    "compared",
    "draw",
    "draw_alone",
    "find_machine",
    "forecast",
    "guard",
    "in_small",
    "largest",
    "load",
    "load_plan",
    "machines",
    "needed",
    "plan",
    "prepare",
    "probe",
    "proving",
    "record",
    "report",
    "require_drawable",
    "require_here",
    "resume",
    "runs",
    "sample",
    "to_rehearse",
    "train",
]
