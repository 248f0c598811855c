"""The verbs: joins the rooms below into what a user calls. No numbers of its own, only calls."""

from windlass.api.compare import ALL, batches, compared
from windlass.api.distributed.cluster_launch import prepare
from windlass.api.distributed.cluster_worker import Worker, as_worker, guard
from windlass.api.distributed.elastic import Survival
from windlass.api.distributed.rank_main import as_device
from windlass.api.largest_model import largest, record, require_here
from windlass.api.machines import machines
from windlass.api.plan import HERE, Planned, Progress, ask, capture, find_machine, plan, probe
from windlass.api.plan_figures import draw, draw_alone, forecast, require_drawable
from windlass.api.runs import RUNS, load, report, runs
from windlass.api.smallest_machine import needed
from windlass.api.training.resume import resume, sample
from windlass.api.training.train import Run, train
from windlass.api.verify.check import Caught, Checking, proving
from windlass.api.verify.instrumentation import Scrutiny
from windlass.api.verify.rehearse import PROCESSES, as_it_is, in_small, load_plan, to_rehearse

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
