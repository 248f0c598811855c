"""The run folder and its journal: created, locked, appended to, listed and loaded again."""

from windlass.tracking.environment import (
    collect_environment,
)
from windlass.tracking.run_folder import (
    RunFolder,
    create_run_folder,
    rank_journal,
    reopen_run_folder,
    require_no_other_content,
)
from windlass.tracking.run_index import (
    RunSummary,
    describe_other_formats,
    find_run,
    list_runs,
)
from windlass.tracking.run_reader import (
    RunRecord,
    load_run,
)
from windlass.tracking.step_records import (
    append_step,
)

__all__ = [
    "RunFolder",
    "RunRecord",
    "RunSummary",
    "append_step",
    "collect_environment",
    "create_run_folder",
    "describe_other_formats",
    "find_run",
    "list_runs",
    "load_run",
    "rank_journal",
    "reopen_run_folder",
    "require_no_other_content",
]
