from .answer import Answer, Bullets, json_text, word_table
from .commands import (
    VERIFICATION_STEPS, Check, Fit, check, evaluate_tables, fit, keys, launch, models, rehearse,
    validate, verification_steps, verified_numerics,
)  # fmt: skip
from .compare import ALL_MACHINES, batch, compare_machines, sparse_speedup
from .data import data_statistics
from .dataflow import Dataflow, dataflow
from .differences.bisection import Bisection, bisect
from .differences.recorded_code import recorded_code
from .differences.run_diff import diff
from .distributed.cluster_launch import Scheduler, prepare_cluster_run
from .distributed.cluster_worker import ClusterHost, ClusterRank, run_cluster_rank, run_host
from .distributed.elastic import ElasticRecovery
from .distributed.kubernetes_jobset import KubernetesJob
from .distributed.launch_script import RayJob, SlurmJob
from .distributed.rank_main import run_rank
from .distributed.rank_server import become_ranks
from .doctor.doctor import DOCTOR_FILE, doctor, require_report_file
from .fine_tuning.peft_adapters import base_of_adapters
from .flags import AsJson, Flag, ManyNames, ManySizes, Names, OnMachine, Shares, Written
from .inference.evaluate import evaluate, score
from .inference.evaluate_on_ranks import score_rank
from .inference.language_model import LanguageModel, load_language_model
from .inference.sample import Drawing, open_dialogue, sample, usual_system_prompt, write_sample
from .judging.judge import LiveJudge, follow_verdict, judge, require_alert, send_alert
from .judging.noise import Noise, noise
from .limits.size_search import largest_model, measure_largest_model, require_local
from .limits.smallest_machine import smallest_machines
from .local_validation.validated_run import (
    Measurement, ValidatedRun, validate_random_plans, validated_runs_file,
)  # fmt: skip
from .machines import HERE, Progress, add_machine, find_machine, machines, probe, write_machine
from .model_graph import capture
from .options import (
    EXPLAINED_PLAN, NO_OPTIONS, SEARCHED_PLAN, ExplainedPlanOptions, PlanOptions, RequestOptions,
    build_plan, build_request, explain_values, require_machine_names, split_overrides,
)  # fmt: skip
from .plan import Planned, make_request, plan, request_origins
from .plan_figures import draw_figure, draw_plan, forecast, require_drawable, write_plan_trace
from .plan_file import load_plan
from .recipes.recipe import (
    RECIPE_SEEDS, Recipe, RecipeResult, known_recipes, plan_recipe, run_recipe,
)  # fmt: skip
from .recipes.recipe_plan import RecipePlan
from .recipes.run_training_recipe import PartResult, TrainingResult, plan_training, run_training
from .recipes.training_recipe import (
    TrainingPlan, TrainingRecipe, is_training_recipe, training_plan, training_recipes,
)  # fmt: skip
from .record.exchange import TrackedRun, import_runs, init, mirror
from .record.serving import SERVER_HOST, SERVER_PORT, read_token, serve
from .record.stores import follow_sync, merge_runs, sync_runs
from .runs import RUNS, annotate, load, report, require_trace_file, runs, write_run_trace
from .sweeping.sweep import Sweep, load_sweep, make_sweep_request, sweep
from .sweeping.sweep_view import draw_sweep, sweep_rows
from .training.default_stack import on_default_stack
from .training.export import ExportedFiles, export
from .training.import_model import import_model
from .training.inputs.job import JobSize, describe_job, job_size, unnamed_data
from .training.loop.hooks import Instrumentation
from .training.parent import ParentRun, find_parent, request_of_child
from .training.parent_options import (
    NO_PARENT, ParentOptions, beside_adapters, plan_of_child, request_of_parent,
)  # fmt: skip
from .training.resume import resume
from .training.run import Run
from .training.train import train
from .value_origins import ValueOrigin, value_origins
from .verify.check import FaultResult, Verifier, verification
from .verify.proof_scope import ProofScope, proof_scope
from .verify.rehearse import MAX_PROCESSES, downscale_plan, rehearsal, rehearse_as_is

__all__ = [
    "ALL_MACHINES", "DOCTOR_FILE", "EXPLAINED_PLAN", "HERE", "MAX_PROCESSES", "NO_OPTIONS",
    "NO_PARENT", "RECIPE_SEEDS", "RUNS", "SEARCHED_PLAN", "SERVER_HOST", "SERVER_PORT",
    "VERIFICATION_STEPS", "Answer", "AsJson", "Bisection", "Bullets", "Check", "ClusterHost",
    "ClusterRank", "Dataflow", "Drawing", "ElasticRecovery", "ExplainedPlanOptions",
    "ExportedFiles", "FaultResult", "Fit", "Flag", "Instrumentation", "JobSize", "KubernetesJob",
    "LanguageModel", "LiveJudge", "ManyNames", "ManySizes", "Measurement", "Names", "Noise",
    "OnMachine", "ParentOptions", "ParentRun", "PartResult", "PlanOptions", "Planned", "Progress",
    "ProofScope", "RayJob", "Recipe", "RecipePlan", "RecipeResult", "RequestOptions", "Run",
    "Scheduler", "Shares", "SlurmJob", "Sweep", "TrackedRun", "TrainingPlan", "TrainingRecipe",
    "TrainingResult",
    "ValidatedRun", "ValueOrigin", "Verifier", "Written", "add_machine", "annotate",
    "base_of_adapters", "batch", "become_ranks", "beside_adapters", "bisect", "build_plan",
    "build_request", "capture", "check", "compare_machines", "data_statistics", "dataflow",
    "describe_job", "diff", "doctor", "downscale_plan", "draw_figure", "draw_plan", "draw_sweep",
    "evaluate", "evaluate_tables", "explain_values", "export", "find_machine", "find_parent", "fit",
    "follow_sync", "follow_verdict", "forecast", "import_model", "import_runs", "init",
    "is_training_recipe", "job_size", "json_text", "judge", "keys", "known_recipes",
    "largest_model", "launch", "load", "load_language_model", "load_plan", "load_sweep", "machines",
    "make_request", "make_sweep_request", "measure_largest_model", "merge_runs", "mirror", "models",
    "noise", "on_default_stack", "open_dialogue", "plan", "plan_of_child", "plan_recipe",
    "plan_training",
    "prepare_cluster_run", "probe", "proof_scope", "read_token", "recorded_code", "rehearsal",
    "rehearse", "rehearse_as_is", "report", "request_of_child", "request_of_parent",
    "request_origins", "require_alert", "require_drawable", "require_local",
    "require_machine_names", "require_report_file", "require_trace_file", "resume",
    "run_cluster_rank", "run_host", "run_rank", "run_recipe", "run_training", "runs", "sample",
    "score", "score_rank", "send_alert", "serve", "smallest_machines", "sparse_speedup",
    "split_overrides", "sweep", "sweep_rows", "sync_runs", "train", "training_plan",
    "training_recipes", "unnamed_data", "usual_system_prompt", "validate", "validate_random_plans",
    "validated_runs_file", "value_origins", "verification", "verification_steps",
    "verified_numerics", "word_table", "write_machine", "write_plan_trace", "write_run_trace",
    "write_sample",
]  # fmt: skip
