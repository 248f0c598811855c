"""The run folder and its journal: created, locked, appended to, listed and loaded again."""

from windlass.tracking.environment import (
    collect_environment,
)
from windlass.tracking.journal import (
    Journal,
    JournalRow,
    JournalWriter,
    read_journal,
)
from windlass.tracking.run_folder import (
    RunFolder,
    create_run_folder,
    journal_files,
    journal_path,
    rank_journal,
    read_run_id,
    reopen_run_folder,
    require_no_other_content,
    write_run_id,
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
    "Journal",
    "JournalRow",
    "JournalWriter",
    "RunFolder",
    "RunRecord",
    "RunSummary",
    "append_step",
    "collect_environment",
    "create_run_folder",
    "describe_other_formats",
    "find_run",
    "journal_files",
    "journal_path",
    "list_runs",
    "load_run",
    "rank_journal",
    "read_journal",
    "read_run_id",
    "reopen_run_folder",
    "require_no_other_content",
    "write_run_id",
]
