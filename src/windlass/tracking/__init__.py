"""The run folder and its journal: created, locked, appended to, listed and loaded again."""

from windlass.tracking.environment import collect_environment
from windlass.tracking.journal import Journal, JournalEvent, JournalRow, JournalWriter, read_journal
from windlass.tracking.load_run import RunRecord, load_run
from windlass.tracking.run_folder import (
    RunFolder,
    create_run_folder,
    read_run_id,
    reopen_run_folder,
    uuid7,
)
from windlass.tracking.run_index import (
    RunSummary,
    describe_other_formats,
    find_run,
    list_runs,
    summarise_run,
)

__all__ = [
    "Journal",
    "JournalEvent",
    "JournalRow",
    "JournalWriter",
    "RunFolder",
    "RunRecord",
    "RunSummary",
    "collect_environment",
    "create_run_folder",
    "describe_other_formats",
    "find_run",
    "list_runs",
    "load_run",
    "read_journal",
    "read_run_id",
    "reopen_run_folder",
    "summarise_run",
    "uuid7",
]
