"""Finds runs again: the catalogue of all runs, its queries, and how stores merge."""

from windlass.record.annotations import (
    Annotations,
    annotate,
    read_annotations,
)
from windlass.record.merge import (
    MergeReport,
    merge_folders,
)
from windlass.record.remote import (
    without_secrets,
)
from windlass.record.sync import (
    SyncReceiver,
    sync_runs,
)

__all__ = [
    "Annotations",
    "MergeReport",
    "SyncReceiver",
    "annotate",
    "merge_folders",
    "read_annotations",
    "sync_runs",
    "without_secrets",
]
