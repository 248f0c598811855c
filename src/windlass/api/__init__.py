"""The Python interface: a function for each command, which returns values instead of printing.

It joins planning, training, verification and reports, and computes nothing itself.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from windlass.api.machines import (
    HERE,
    Progress,
    find_machine,
    machines,
    probe,
    write_machine,
)
from windlass.api.model_graph import capture
from windlass.api.plan import Planned, make_request, plan, request_origins
from windlass.api.runs import (
    RUNS,
    annotate,
    load,
    report,
    require_trace_file,
    runs,
    write_run_trace,
)
from windlass.api.value_origins import ValueOrigin, value_origins

if TYPE_CHECKING:
    from windlass.api.commands import (
        BATCH_SIZES,
        VERIFICATION_STEPS,
        Check,
        Fit,
        batch,
        check,
        evaluate_tables,
        fit,
        keys,
        launch,
        models,
        rehearse,
        validate,
        verified_numerics,
    )
    from windlass.api.compare import ALL_MACHINES, compare_batches, compare_machines
    from windlass.api.data import data_statistics
    from windlass.api.differences.bisection import Bisection, bisect
    from windlass.api.differences.run_diff import diff, write_run_diff
    from windlass.api.distributed.cluster_launch import prepare_cluster_run
    from windlass.api.distributed.cluster_worker import (
        ClusterHost,
        ClusterRank,
        run_cluster_rank,
        run_host,
    )
    from windlass.api.distributed.elastic import ElasticRecovery
    from windlass.api.distributed.kubernetes_jobset import KubernetesJob
    from windlass.api.distributed.launch_script import SlurmJob
    from windlass.api.distributed.rank_main import run_rank
    from windlass.api.judging.judge import (
        LiveJudge,
        follow_verdict,
        judge,
        require_alert,
        send_alert,
    )
    from windlass.api.judging.noise import Noise, noise
    from windlass.api.local_validation.validated_run import (
        Measurement,
        ValidatedRun,
        validate_random_plans,
        validated_runs_file,
    )
    from windlass.api.plan_figures import (
        draw_figure,
        draw_plan,
        forecast,
        require_drawable,
        write_plan_trace,
    )
    from windlass.api.plan_file import load_plan
    from windlass.api.record.exchange import import_runs, mirror
    from windlass.api.record.serving import SERVER_HOST, SERVER_PORT, read_token, serve
    from windlass.api.record.stores import follow_sync, merge_runs, sync_runs
    from windlass.api.size_search import largest_model, measure_largest_model, require_local
    from windlass.api.smallest_machine import smallest_machines
    from windlass.api.sweeping.sweep import Sweep, load_sweep, make_sweep_request, sweep
    from windlass.api.sweeping.sweep_view import draw_sweep, sweep_rows
    from windlass.api.training.instrumentation import Instrumentation
    from windlass.api.training.parent import ParentRun, find_parent
    from windlass.api.training.resume import resume, sample, write_sample
    from windlass.api.training.train import Run, train
    from windlass.api.verify.check import FaultResult, Verifier, verification
    from windlass.api.verify.rehearse import (
        MAX_PROCESSES,
        downscale_plan,
        rehearsal,
        rehearse_as_is,
    )
    from windlass.integrations import TrackedRun, init
    from windlass.sweep import sweep_names

__all__ = [
    "ALL_MACHINES",
    "BATCH_SIZES",
    "HERE",
    "MAX_PROCESSES",
    "RUNS",
    "SERVER_HOST",
    "SERVER_PORT",
    "VERIFICATION_STEPS",
    "Bisection",
    "Check",
    "ClusterHost",
    "ClusterRank",
    "ElasticRecovery",
    "FaultResult",
    "Fit",
    "Instrumentation",
    "KubernetesJob",
    "LiveJudge",
    "Measurement",
    "Noise",
    "ParentRun",
    "Planned",
    "Progress",
    "Run",
    "SlurmJob",
    "Sweep",
    "TrackedRun",
    "ValidatedRun",
    "ValueOrigin",
    "Verifier",
    "annotate",
    "batch",
    "bisect",
    "capture",
    "check",
    "compare_batches",
    "compare_machines",
    "data_statistics",
    "diff",
    "downscale_plan",
    "draw_figure",
    "draw_plan",
    "draw_sweep",
    "evaluate_tables",
    "find_machine",
    "find_parent",
    "fit",
    "follow_sync",
    "follow_verdict",
    "forecast",
    "import_runs",
    "init",
    "judge",
    "keys",
    "largest_model",
    "launch",
    "load",
    "load_plan",
    "load_sweep",
    "machines",
    "make_request",
    "make_sweep_request",
    "measure_largest_model",
    "merge_runs",
    "mirror",
    "models",
    "noise",
    "plan",
    "prepare_cluster_run",
    "probe",
    "read_token",
    "rehearsal",
    "rehearse",
    "rehearse_as_is",
    "report",
    "request_origins",
    "require_alert",
    "require_drawable",
    "require_local",
    "require_trace_file",
    "resume",
    "run_cluster_rank",
    "run_host",
    "run_rank",
    "runs",
    "sample",
    "send_alert",
    "serve",
    "smallest_machines",
    "sweep",
    "sweep_names",
    "sweep_rows",
    "sync_runs",
    "train",
    "validate",
    "validate_random_plans",
    "validated_runs_file",
    "value_origins",
    "verification",
    "verified_numerics",
    "write_machine",
    "write_plan_trace",
    "write_run_diff",
    "write_run_trace",
    "write_sample",
]

_LATE = {
    "largest_model": "windlass.api.size_search",
    "measure_largest_model": "windlass.api.size_search",
    "require_local": "windlass.api.size_search",
    "BATCH_SIZES": "windlass.api.commands",
    "VERIFICATION_STEPS": "windlass.api.commands",
    "Check": "windlass.api.commands",
    "Fit": "windlass.api.commands",
    "batch": "windlass.api.commands",
    "check": "windlass.api.commands",
    "evaluate_tables": "windlass.api.commands",
    "fit": "windlass.api.commands",
    "keys": "windlass.api.commands",
    "launch": "windlass.api.commands",
    "models": "windlass.api.commands",
    "rehearse": "windlass.api.commands",
    "validate": "windlass.api.commands",
    "verified_numerics": "windlass.api.commands",
    "ALL_MACHINES": "windlass.api.compare",
    "compare_batches": "windlass.api.compare",
    "compare_machines": "windlass.api.compare",
    "data_statistics": "windlass.api.data",
    "prepare_cluster_run": "windlass.api.distributed.cluster_launch",
    "ClusterHost": "windlass.api.distributed.cluster_worker",
    "ClusterRank": "windlass.api.distributed.cluster_worker",
    "run_cluster_rank": "windlass.api.distributed.cluster_worker",
    "run_host": "windlass.api.distributed.cluster_worker",
    "ElasticRecovery": "windlass.api.distributed.elastic",
    "KubernetesJob": "windlass.api.distributed.kubernetes_jobset",
    "SlurmJob": "windlass.api.distributed.launch_script",
    "run_rank": "windlass.api.distributed.rank_main",
    "draw_figure": "windlass.api.plan_figures",
    "draw_plan": "windlass.api.plan_figures",
    "forecast": "windlass.api.plan_figures",
    "require_drawable": "windlass.api.plan_figures",
    "write_plan_trace": "windlass.api.plan_figures",
    "load_plan": "windlass.api.plan_file",
    "smallest_machines": "windlass.api.smallest_machine",
    "Instrumentation": "windlass.api.training.instrumentation",
    "ParentRun": "windlass.api.training.parent",
    "find_parent": "windlass.api.training.parent",
    "resume": "windlass.api.training.resume",
    "sample": "windlass.api.training.resume",
    "write_sample": "windlass.api.training.resume",
    "Run": "windlass.api.training.train",
    "train": "windlass.api.training.train",
    "FaultResult": "windlass.api.verify.check",
    "Verifier": "windlass.api.verify.check",
    "verification": "windlass.api.verify.check",
    "MAX_PROCESSES": "windlass.api.verify.rehearse",
    "downscale_plan": "windlass.api.verify.rehearse",
    "rehearsal": "windlass.api.verify.rehearse",
    "rehearse_as_is": "windlass.api.verify.rehearse",
    "Bisection": "windlass.api.differences.bisection",
    "bisect": "windlass.api.differences.bisection",
    "diff": "windlass.api.differences.run_diff",
    "write_run_diff": "windlass.api.differences.run_diff",
    "import_runs": "windlass.api.record.exchange",
    "mirror": "windlass.api.record.exchange",
    "LiveJudge": "windlass.api.judging.judge",
    "follow_verdict": "windlass.api.judging.judge",
    "judge": "windlass.api.judging.judge",
    "require_alert": "windlass.api.judging.judge",
    "send_alert": "windlass.api.judging.judge",
    "Noise": "windlass.api.judging.noise",
    "noise": "windlass.api.judging.noise",
    "Measurement": "windlass.api.local_validation.validated_run",
    "ValidatedRun": "windlass.api.local_validation.validated_run",
    "validate_random_plans": "windlass.api.local_validation.validated_run",
    "validated_runs_file": "windlass.api.local_validation.validated_run",
    "SERVER_HOST": "windlass.api.record.serving",
    "SERVER_PORT": "windlass.api.record.serving",
    "read_token": "windlass.api.record.serving",
    "serve": "windlass.api.record.serving",
    "follow_sync": "windlass.api.record.stores",
    "merge_runs": "windlass.api.record.stores",
    "sync_runs": "windlass.api.record.stores",
    "Sweep": "windlass.api.sweeping.sweep",
    "load_sweep": "windlass.api.sweeping.sweep",
    "make_sweep_request": "windlass.api.sweeping.sweep",
    "sweep": "windlass.api.sweeping.sweep",
    "draw_sweep": "windlass.api.sweeping.sweep_view",
    "sweep_rows": "windlass.api.sweeping.sweep_view",
    "TrackedRun": "windlass.integrations",
    "init": "windlass.integrations",
    "sweep_names": "windlass.sweep",
}
"""Modules of the names that are imported when they are first asked for: no plan needs them."""


def __getattr__(name: str) -> object:
    """Imports a late name."""
    if name not in _LATE:
        raise AttributeError(f"module `windlass.api` has no attribute `{name}`")
    value: object = getattr(import_module(_LATE[name]), name)
    globals()[name] = value
    return value
