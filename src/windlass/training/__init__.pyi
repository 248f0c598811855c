from .new_run import on_default_stack, start_run, train
from .disk_check import disk_usage_bytes
from .imported_run import import_model
from .inputs.batches import FIRST_QUESTION, data_notes, make_batches, with_document_lengths
from .inputs.job import JobSize, describe_job, job_size, unnamed_data
from .inputs.run_data import load_run_tokens
from .legs import as_single_leg, request_at_step
from .loop.hooks import Instrumentation, LoopHooks, never_stop
from .loop.local_ranks import launch_local_ranks, rank_server, watchdog_timeouts
from .loop.training_loop import train_rank
from .parent import ParentRun, find_parent, request_of_child
from .parent_options import (
    NO_PARENT, ParentOptions, beside_adapters, plan_of_child, request_of_parent,
)  # fmt: skip
from .preconditions import require_local_machine, verified_programs
from .resumed_run import (
    continue_run, objects_of_record, reopen_run, replan, require_steps_left, resume,
)  # fmt: skip
from .run import Run
from .run_files import planned_from_record, require_unchanged, run_documents
from .weight_files import ExportedFiles, export

__all__ = [
    "FIRST_QUESTION", "NO_PARENT", "ExportedFiles", "Instrumentation", "JobSize", "LoopHooks",
    "ParentOptions", "ParentRun", "Run", "as_single_leg", "beside_adapters", "continue_run",
    "data_notes", "describe_job", "disk_usage_bytes", "export", "find_parent", "import_model",
    "job_size", "launch_local_ranks", "load_run_tokens", "make_batches", "never_stop",
    "objects_of_record", "on_default_stack", "plan_of_child", "planned_from_record", "rank_server",
    "reopen_run", "replan", "request_at_step", "request_of_child", "request_of_parent",
    "require_local_machine", "require_steps_left", "require_unchanged", "resume", "run_documents",
    "start_run", "train", "train_rank", "unnamed_data", "verified_programs", "watchdog_timeouts",
    "with_document_lengths",
]  # fmt: skip
