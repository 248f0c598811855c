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
        KubernetesJob,
        RayJob,
        Run,
        SlurmJob,
        Sweep,
        TrackedRun,
        batch,
        capture,
        check,
        compare_machines,
        data_statistics,
        evaluate,
        export,
        find_parent,
        fit,
        import_model,
        import_runs,
        init,
        keys,
        launch,
        load_language_model,
        load_sweep,
        mirror,
        models,
        plan_recipe,
        rehearse,
        resume,
        run_recipe,
        sample,
        score,
        smallest_machines,
        sweep,
        train,
        validate,
    )
    from windlass.api.dataflow import dataflow
    from windlass.api.differences.bisection import bisect
    from windlass.api.differences.run_diff import diff
    from windlass.api.doctor.doctor import doctor
    from windlass.api.judging.judge import judge
    from windlass.api.judging.noise import noise
    from windlass.api.limits.size_search import largest_model, measure_largest_model
    from windlass.api.machines import add_machine, find_machine, machines, probe
    from windlass.api.plan import Planned, make_request, plan
    from windlass.api.record.serving import serve
    from windlass.api.record.stores import merge_runs, sync_runs
    from windlass.api.runs import annotate, load, report, runs

__all__ = [
    "KubernetesJob",
    "Planned",
    "RayJob",
    "Run",
    "SlurmJob",
    "Sweep",
    "TrackedRun",
    "WindlassError",
    "add_machine",
    "annotate",
    "batch",
    "bisect",
    "capture",
    "check",
    "compare_machines",
    "data_statistics",
    "dataflow",
    "diff",
    "doctor",
    "evaluate",
    "export",
    "find_machine",
    "find_parent",
    "fit",
    "import_model",
    "import_runs",
    "init",
    "judge",
    "keys",
    "largest_model",
    "launch",
    "load",
    "load_language_model",
    "load_sweep",
    "machines",
    "make_request",
    "measure_largest_model",
    "merge_runs",
    "mirror",
    "models",
    "noise",
    "plan",
    "plan_recipe",
    "probe",
    "rehearse",
    "report",
    "resume",
    "run_recipe",
    "runs",
    "sample",
    "score",
    "serve",
    "smallest_machines",
    "sweep",
    "sync_runs",
    "train",
    "validate",
]
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
