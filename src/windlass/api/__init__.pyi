from windlass.answer import Answer, Bullets, json_text, word_table
from windlass.api.engines.engine_table import EVERY_ENGINE, plan_on_engines
from windlass.api.engines.engine_config import plan_of_config
from windlass.api.engines.adoption import AdoptedRun, adopt
from windlass.api.engines.engine_export import EngineExport, export
from windlass.api.commands import Fit, evaluate_tables, fit, validate
from windlass.api.compare import ALL_MACHINES, batch, compare_machines, sparse_speedup
from windlass.api.layer_dataflow import Dataflow, dataflow
from windlass.api.size_search import largest_model, measure_largest_model, require_local
from windlass.api.smallest_machine import smallest_machines
from windlass.api.names import keys, models
from windlass.api.proof import (
    VERIFICATION_STEPS, Check, check, rehearse, verification_steps, verified, verified_numerics,
)  # fmt: skip
from windlass.api.exchange import TrackedRun, import_runs, init, mirror
from windlass.api.serving import SERVER_HOST, SERVER_PORT, read_token, serve
from windlass.api.stores import follow_sync, merge_runs, sync_runs
from windlass.distributed import (
    ClusterHost, ClusterRank, ElasticRecovery, KubernetesJob, RayJob, Scheduler, SlurmJob,
    become_ranks, launch, run_cluster_rank, run_host, run_rank,
)  # fmt: skip
from windlass.doctor import DOCTOR_FILE, doctor, require_report_file
from windlass.experiments import (
    RECIPE_SEEDS, PartResult, Recipe, RecipePlan, RecipeResult, Sweep, TrainingPlan, TrainingRecipe,
    TrainingResult, draw_sweep, is_training_recipe, known_recipes, load_sweep, make_sweep_request,
    plan_recipe, plan_training, run_recipe, run_training, sweep, sweep_rows, training_plan,
    training_recipes,
)  # fmt: skip
from windlass.flags import AsJson, Flag, ManyNames, ManySizes, Names, OnMachine, Shares, Written
from windlass.inference import (
    AnswerDrawing, Drawing, LanguageModel, Scores, evaluate, load_language_model, open_dialogue,
    sample, score, score_rank, usual_system_prompt, write_sample,
)  # fmt: skip
from windlass.jobs import (
    EXPLAINED_PLAN, HERE, NO_OPTIONS, RUNS, SEARCHED_PLAN, ExplainedPlanOptions, PlanOptions,
    Planned, Progress, RequestOptions, ValueOrigin, add_machine, annotate, base_of_adapters,
    build_plan, build_request, capture, data_statistics, draw_figure, draw_plan, explain_values,
    find_machine, forecast, load, load_plan, machines, make_request, plan, probe, report,
    request_origins, require_drawable, require_machine_names, require_trace_file, runs,
    split_overrides, value_origins, write_machine, write_plan_trace, write_run_trace,
)  # fmt: skip
from windlass.judging import (
    Bisection, LiveJudge, Noise, bisect, diff, follow_verdict, judge, noise, recorded_code,
    require_alert, send_alert,
)  # fmt: skip
from windlass.training import (
    NO_PARENT, ExportedFiles, Instrumentation, JobSize, ParentOptions, ParentRun, Run,
    beside_adapters, describe_job, find_parent, import_model, job_size, on_default_stack,
    plan_of_child, request_of_child, request_of_parent, resume, train, unnamed_data,
)  # fmt: skip
from windlass.verify import (
    MAX_PROCESSES, FaultResult, Measurement, ProofScope, ValidatedRun, Verifier, downscale_plan,
    proof_scope, rehearsal, rehearse_as_is, validate_random_plans, validated_runs_file,
    verification,
)  # fmt: skip

__all__ = [
    "ALL_MACHINES", "DOCTOR_FILE", "EVERY_ENGINE", "EXPLAINED_PLAN", "HERE", "MAX_PROCESSES",
    "NO_OPTIONS", "NO_PARENT", "RECIPE_SEEDS", "RUNS", "SEARCHED_PLAN", "SERVER_HOST",
    "SERVER_PORT", "VERIFICATION_STEPS", "AdoptedRun", "Answer", "AnswerDrawing", "AsJson",
    "Bisection", "Bullets", "Check", "ClusterHost", "ClusterRank", "Dataflow", "Drawing",
    "ElasticRecovery", "EngineExport", "ExplainedPlanOptions", "ExportedFiles", "FaultResult",
    "Fit", "Flag", "Instrumentation", "JobSize", "KubernetesJob", "LanguageModel", "LiveJudge",
    "ManyNames", "ManySizes", "Measurement", "Names", "Noise", "OnMachine", "ParentOptions",
    "ParentRun", "PartResult", "PlanOptions", "Planned", "Progress", "ProofScope", "RayJob",
    "Recipe", "RecipePlan", "RecipeResult", "RequestOptions", "Run", "Scheduler", "Scores",
    "Shares", "SlurmJob", "Sweep", "TrackedRun", "TrainingPlan", "TrainingRecipe", "TrainingResult",
    "ValidatedRun", "ValueOrigin", "Verifier", "Written", "add_machine", "adopt", "annotate",
    "base_of_adapters", "batch", "become_ranks", "beside_adapters", "bisect", "build_plan",
    "build_request", "capture", "check", "compare_machines", "data_statistics", "dataflow",
    "describe_job", "diff", "doctor", "downscale_plan", "draw_figure", "draw_plan", "draw_sweep",
    "evaluate", "evaluate_tables", "explain_values", "export", "find_machine", "find_parent", "fit",
    "follow_sync", "follow_verdict", "forecast", "import_model", "import_runs", "init",
    "is_training_recipe", "job_size", "json_text", "judge", "keys", "known_recipes",
    "largest_model", "launch", "load", "load_language_model", "load_plan", "load_sweep", "machines",
    "make_request", "make_sweep_request", "measure_largest_model", "merge_runs", "mirror", "models",
    "noise", "on_default_stack", "open_dialogue", "plan", "plan_of_child", "plan_of_config",
    "plan_on_engines", "plan_recipe", "plan_training", "probe", "proof_scope", "read_token",
    "recorded_code", "rehearsal", "rehearse", "rehearse_as_is", "report", "request_of_child",
    "request_of_parent", "request_origins", "require_alert", "require_drawable", "require_local",
    "require_machine_names", "require_report_file", "require_trace_file", "resume",
    "run_cluster_rank", "run_host", "run_rank", "run_recipe", "run_training", "runs", "sample",
    "score", "score_rank", "send_alert", "serve", "smallest_machines", "sparse_speedup",
    "split_overrides", "sweep", "sweep_rows", "sync_runs", "train", "training_plan",
    "training_recipes", "unnamed_data", "usual_system_prompt", "validate", "validate_random_plans",
    "validated_runs_file", "value_origins", "verification", "verification_steps", "verified",
    "verified_numerics", "word_table", "write_machine", "write_plan_trace", "write_run_trace",
    "write_sample",
]  # fmt: skip
