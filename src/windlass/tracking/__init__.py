"""Records runs: journal, run folder, lock, list, load."""

from windlass.track.environment import collect
from windlass.track.find import RunSummary, find, list_runs, summarise
from windlass.track.history import Record, load
from windlass.track.journal import Event, Journal, JournalWriter, Row, read_journal
from windlass.track.run import RunFolder, create, read_id, reopen, uuid7

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
