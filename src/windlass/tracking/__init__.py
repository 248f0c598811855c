"""The run folder and its journal: created, locked, appended to, listed and loaded again."""

from windlass.tracking.code_snapshot import (
    snapshot_code,
)
from windlass.tracking.data_manifest import (
    data_manifest,
)
from windlass.tracking.environment import (
    collect_environment,
)
from windlass.tracking.folder_lock import (
    is_locked,
)
from windlass.tracking.journal import (
    SYSTEM_PREFIX,
    Journal,
    JournalEvent,
    JournalEventName,
    JournalRow,
    JournalWriter,
)
from windlass.tracking.journal_reader import (
    JournalCursor,
    JournalRecords,
    journal_writer_id,
    parse_journal,
    read_journal,
)
from windlass.tracking.run_folder import (
    ID_FILE,
    LOCK_FILE,
    RUN_FORMAT,
    SHORT_ID_DIGITS,
    RunFolder,
    create_run_folder,
    journal_files,
    journal_path,
    rank_journal,
    read_run_format,
    read_run_id,
    reopen_run_folder,
    require_no_other_content,
    run_folder_name,
    uuid7,
    write_run_id,
)
from windlass.tracking.run_index import (
    RunSummary,
    describe_other_formats,
    describe_parent,
    find_run,
    list_runs,
)
from windlass.tracking.run_inputs import (
    INPUT_FILES,
    input_fingerprints,
)
from windlass.tracking.run_reader import (
    RunRecord,
    load_run,
)
from windlass.tracking.series import (
    Series,
    continued,
    journal_ranks,
    read_series,
    series_of,
)
from windlass.tracking.step_records import (
    append_step,
)

__all__ = [
    "ID_FILE",
    "INPUT_FILES",
    "LOCK_FILE",
    "RUN_FORMAT",
    "SHORT_ID_DIGITS",
    "SYSTEM_PREFIX",
    "Journal",
    "JournalCursor",
    "JournalEvent",
    "JournalEventName",
    "JournalRecords",
    "JournalRow",
    "JournalWriter",
    "RunFolder",
    "RunRecord",
    "RunSummary",
    "Series",
    "append_step",
    "collect_environment",
    "continued",
    "create_run_folder",
    "data_manifest",
    "describe_other_formats",
    "describe_parent",
    "find_run",
    "input_fingerprints",
    "is_locked",
    "journal_files",
    "journal_path",
    "journal_ranks",
    "journal_writer_id",
    "list_runs",
    "load_run",
    "parse_journal",
    "rank_journal",
    "read_journal",
    "read_run_format",
    "read_run_id",
    "read_series",
    "reopen_run_folder",
    "require_no_other_content",
    "run_folder_name",
    "series_of",
    "snapshot_code",
    "uuid7",
    "write_run_id",
]
