from .annotations import Annotations, annotate, read_annotations
from .catalog import RUNS, Catalog
from .merge import MergeReport, merge_folders
from .parquet import export_csv, export_parquet
from .postgres import TeamCatalog
from .pyramid import Curve
from .queries import ALL_RUNS, RunQueries
from .remote import without_secrets
from .run_entry import read_run_entry
from .run_row import COLUMNS, RunQuery, RunRow, Setting
from .sync import SyncReceiver, sync_runs

__all__ = [
    "ALL_RUNS", "COLUMNS", "RUNS", "Annotations", "Catalog", "Curve", "MergeReport", "RunQueries",
    "RunQuery", "RunRow", "Setting", "SyncReceiver", "TeamCatalog", "annotate", "export_csv",
    "export_parquet", "merge_folders", "read_annotations", "read_run_entry", "sync_runs",
    "without_secrets",
]  # fmt: skip
