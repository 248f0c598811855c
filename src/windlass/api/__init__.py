"""The Python interface: a function for each command, which returns values instead of printing.

It joins planning, training, verification and reports, and computes nothing itself.
"""

from windlass.api.bisect import Bisection, bisect
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
from windlass.api.diff import diff, write_run_diff
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
from windlass.api.exchange import import_runs, mirror
from windlass.api.judging.judge import (
    LiveJudge,
    follow_verdict,
    judge,
    require_alert,
    send_alert,
)
from windlass.api.judging.noise import Noise, noise
from windlass.api.largest_model import largest_model, measure_largest_model, require_local
from windlass.api.local_validation.validated_run import (
    Measurement,
    ValidatedRun,
    validate_random_plans,
    validated_runs_file,
)
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
from windlass.api.plan_figures import (
    draw_figure,
    draw_plan,
    forecast,
    require_drawable,
    write_plan_trace,
)
from windlass.api.plan_file import load_plan
from windlass.api.runs import (
    RUNS,
    annotate,
    load,
    report,
    require_trace_file,
    runs,
    write_run_trace,
)
from windlass.api.serve import HOST as SERVER_HOST, PORT as SERVER_PORT, read_token, serve
from windlass.api.smallest_machine import smallest_machines
from windlass.api.stores import follow_sync, merge_runs, sync_runs
from windlass.api.sweeping.sweep import Sweep, load_sweep, make_sweep_request, sweep
from windlass.api.sweeping.sweep_view import draw_sweep, sweep_rows
from windlass.api.training.instrumentation import Instrumentation
from windlass.api.training.parent import ParentRun, find_parent
from windlass.api.training.resume import resume, sample, write_sample
from windlass.api.training.train import Run, train
from windlass.api.value_origins import ValueOrigin, value_origins
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
