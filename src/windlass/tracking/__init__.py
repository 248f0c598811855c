"""Records runs: journal, run folder, lock, list, load."""

from windlass.tracking.environment import collect
from windlass.tracking.journal import Event, Journal, JournalWriter, Row, read_journal
from windlass.tracking.load_run import Record, load
from windlass.tracking.run_folder import RunFolder, create, read_id, reopen, uuid7
from windlass.tracking.run_index import RunSummary, find, list_runs, summarise

__all__ = [
    "Event",
    "Journal",
    "JournalWriter",
    "Record",
    "Row",
    "RunFolder",
    "RunSummary",
    "collect",
    "create",
    "find",
    "list_runs",
    "load",
    "read_id",
    "read_journal",
    "reopen",
    "summarise",
    "uuid7",
]
