"""The verbs: joins the rooms below into what a user calls. No numbers of its own, only calls."""

from windlass.api.biggest import largest, record, require_here
from windlass.api.cluster import prepare
from windlass.api.device import as_device
from windlass.api.plan import HERE, Planned, Progress, ask, capture, find_machine, plan, probe
from windlass.api.record import RUNS, load, report, runs
from windlass.api.resume import resume, sample
from windlass.api.run import Run, train
from windlass.api.survive import Survival
from windlass.api.worker import Worker, as_worker

__all__ = [
    "HERE",
    "RUNS",
    "Planned",
    "Progress",
    "Run",
    "Survival",
    "Worker",
    "as_device",
    "as_worker",
    "ask",
    "capture",
    "find_machine",
    "largest",
    "load",
    "plan",
    "prepare",
    "probe",
    "record",
    "report",
    "require_here",
    "resume",
    "runs",
    "sample",
    "train",
]
