"""Windlass: train a large model on whatever machine you have.

The commands of the command line are functions here, and return values instead of text:

    planned = windlass.plan("gpt-tiny")
    for step in windlass.train(planned):
        print(step.step, step.loss)
"""

from typing import TYPE_CHECKING

from windlass.errors import WindlassError

if TYPE_CHECKING:
    from windlass.api import (
        KubernetesJob, Planned, RayJob, Run, SlurmJob, Sweep, TrackedRun, add_machine, adopt,
        annotate, batch, bisect, capture, check, compare_machines, data_statistics, diff,
        evaluate, export, find_machine, find_parent, fit, import_model, import_runs, init, judge,
        keys, largest_model, launch, load, load_language_model, load_sweep, make_request,
        measure_largest_model, merge_runs, mirror, models, noise, plan_recipe, probe,
        rehearse, report, resume, run_recipe, sample, score, serve, smallest_machines, sweep,
        sync_runs, train, validate,
    )  # fmt: skip
    from windlass.api.layer_dataflow import dataflow
    from windlass.doctor import doctor
    from windlass.jobs import machines, plan, runs

__all__ = [
    "KubernetesJob", "Planned", "RayJob", "Run", "SlurmJob", "Sweep", "TrackedRun", "WindlassError",
    "add_machine", "adopt", "annotate", "batch", "bisect", "capture", "check", "compare_machines",
    "data_statistics", "dataflow", "diff", "doctor", "evaluate", "export", "find_machine",
    "find_parent", "fit", "import_model", "import_runs", "init", "judge", "keys", "largest_model",
    "launch", "load", "load_language_model", "load_sweep", "machines", "make_request",
    "measure_largest_model", "merge_runs", "mirror", "models", "noise", "plan", "plan_recipe",
    "probe", "rehearse", "report", "resume", "run_recipe", "runs", "sample", "score", "serve",
    "smallest_machines", "sweep", "sync_runs", "train", "validate",
]  # fmt: skip
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Imports the whole interface when a name of it is first asked for.

    All names at once, because some of them (`report`, `models`) are those of packages too: an
    import of such a package puts it in the place of the function, once and for all.
    """
    if name not in __all__:
        raise AttributeError(f"module `windlass` has no attribute `{name}`")
    from windlass import api

    globals().update({each: getattr(api, each) for each in __all__ if each != "WindlassError"})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted((*globals(), *__all__))
