from .code_snapshot import snapshot_code
from .environment import collect_environment, processor_name
from .folder_lock import (
    ID_FILE, LOCK_FILE, FolderLock, is_locked, is_unfinished_start, require_no_links,
)  # fmt: skip
from .journal import SYSTEM_PREFIX, Journal, JournalEvent, JournalRow, JournalWriter
from .journal_reader import (
    JournalCursor, JournalRecords, calendar_time, journal_writer_id, parse_journal, read_journal,
)  # fmt: skip
from .journal_union import JournalUnion, unite_journals
from .record_faults import (
    changed_files, describe_skipped, first_attempt_of_plan, is_from_this_host, journal_faults,
)  # fmt: skip
from .redaction import kept_variables, without_personal_data, without_secrets
from .run_folder import (
    MOST_ID_BYTES, RUN_FORMAT, SHORT_ID_DIGITS, JournalFile, RunFolder, create_run_folder,
    journal_files, journal_path, rank_journal, read_run_format, read_run_id, reopen_run_folder,
    require_no_other_content, run_folder_name, uuid7, write_run_id,
)  # fmt: skip
from .run_reader import RunRecord, describe_other_formats, describe_parent, find_run, load_run
from .run_inputs import INPUT_FILES, input_fingerprints, make_data_manifest
from .series import Series, continued, journal_ranks, main_series, read_series, series_of
from .step_records import append_step
from .system_monitor import SystemMonitor

__all__ = [
    "ID_FILE", "INPUT_FILES", "LOCK_FILE", "MOST_ID_BYTES", "RUN_FORMAT", "SHORT_ID_DIGITS",
    "SYSTEM_PREFIX", "FolderLock", "Journal", "JournalCursor", "JournalEvent", "JournalFile",
    "JournalRecords", "JournalRow", "JournalUnion", "JournalWriter", "RunFolder", "RunRecord",
    "Series", "SystemMonitor", "append_step", "calendar_time", "changed_files",
    "collect_environment", "continued", "create_run_folder", "describe_other_formats",
    "describe_parent", "describe_skipped", "find_run", "first_attempt_of_plan",
    "input_fingerprints", "is_from_this_host", "is_locked", "is_unfinished_start", "journal_faults",
    "journal_files", "journal_path", "journal_ranks", "journal_writer_id", "kept_variables",
    "load_run", "main_series", "make_data_manifest", "parse_journal", "processor_name",
    "rank_journal",
    "read_journal", "read_run_format", "read_run_id", "read_series", "reopen_run_folder",
    "require_no_links", "require_no_other_content", "run_folder_name", "series_of", "snapshot_code",
    "unite_journals", "uuid7", "without_personal_data", "without_secrets", "write_run_id",
]  # fmt: skip
