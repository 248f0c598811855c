from .arguments.optimizer import optimizer_overrides
from .data import (
    data_statistics, estimate_data, has_own_text, prepare_data, prepare_tokens, size_of,
)  # fmt: skip
from .fine_tuning import (
    base_of_adapters, exported_config, special_tokens, write_small_files,
)  # fmt: skip
from .kept_results import note_compiled_code
from .known_machines import (
    EVERY_PART, HERE, Progress, add_machine, find_machine, find_stack, machines, needed_parts,
    on_stack, parts_of_plan, probe, show_machine, write_machine,
)  # fmt: skip
from .model_graph import build_requested_model, capture, capture_traces
from .objects import (
    IN_MEMORY, NO_OBJECTS, PlannedObjects, model_arguments, own_tokenizer, take_trained_weights,
)  # fmt: skip
from .options import (
    EXPLAINED_PLAN, NO_OPTIONS, SEARCHED_PLAN, ExplainedPlanOptions, Model, PlanOptions,
    RequestOptions, ValueOrigin, build_plan, build_request, explain_values, require_machine_names,
    split_model, split_overrides, value_origins,
)  # fmt: skip
from .plan_figures import draw_figure, draw_plan, forecast, require_drawable, write_plan_trace
from .plan_file import load_plan, split_machine, with_tensor_shards
from .planned import Planned, make_request, plan, plan_request, request_origins
from .run_records import RUNS, annotate, load, report, require_trace_file, runs, write_run_trace

__all__ = [
    "EVERY_PART", "EXPLAINED_PLAN", "HERE", "IN_MEMORY", "NO_OBJECTS", "NO_OPTIONS", "RUNS",
    "SEARCHED_PLAN", "ExplainedPlanOptions", "Model", "PlanOptions", "Planned", "PlannedObjects",
    "Progress", "RequestOptions", "ValueOrigin", "add_machine", "annotate", "base_of_adapters",
    "build_plan", "build_request", "build_requested_model", "capture", "capture_traces",
    "data_statistics", "draw_figure", "draw_plan", "estimate_data", "explain_values",
    "exported_config", "find_machine", "find_stack", "forecast", "has_own_text", "load",
    "load_plan", "machines", "make_request", "model_arguments", "needed_parts",
    "note_compiled_code", "on_stack", "optimizer_overrides", "own_tokenizer", "parts_of_plan",
    "plan", "plan_request", "prepare_data", "prepare_tokens", "probe", "report", "request_origins",
    "require_drawable", "require_machine_names", "require_trace_file", "runs", "show_machine",
    "size_of", "special_tokens", "split_machine", "split_model", "split_overrides",
    "take_trained_weights", "value_origins", "with_tensor_shards", "write_machine",
    "write_plan_trace", "write_run_trace", "write_small_files",
]  # fmt: skip
