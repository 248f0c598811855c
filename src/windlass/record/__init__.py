"""Finds runs again: the catalogue of all runs, its queries, and how stores merge."""

from windlass.record.annotations import (
    Annotations,
    annotate,
    read_annotations,
)
from windlass.record.catalog import (
    RUNS,
    Catalog,
)
from windlass.record.merge import (
    MergeReport,
    merge_folders,
)
from windlass.record.pyramid import (
    Curve,
    SeriesSummary,
)
from windlass.record.queries import (
    ALL_RUNS,
    RunQueries,
)
from windlass.record.remote import (
    without_secrets,
)
from windlass.record.run_entry import (
    RunEntry,
    read_run_entry,
)
from windlass.record.run_row import (
    COLUMNS,
    RunQuery,
    RunRow,
    Setting,
)
from windlass.record.sync import (
    SyncReceiver,
    sync_runs,
)

__all__ = [
    "ALL_RUNS",
    "COLUMNS",
    "RUNS",
    "Annotations",
    "Catalog",
    "Curve",
    "MergeReport",
    "RunEntry",
    "RunQueries",
    "RunQuery",
    "RunRow",
    "SeriesSummary",
    "Setting",
    "SyncReceiver",
    "annotate",
    "merge_folders",
    "read_annotations",
    "read_run_entry",
    "sync_runs",
    "without_secrets",
]
