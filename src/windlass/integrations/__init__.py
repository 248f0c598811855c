"""Exchanges runs with other trackers and training loops.

`windlass.integrations.transformers`, `lightning` and `lm_eval` are imported by name, because each
needs its package.
"""

from windlass.integrations.harness import (
    Harness,
    task_names,
)
from windlass.integrations.imports.engine_logs import (
    LogSize,
    ReadLog,
    load_log_format,
    log_formats,
    read_log,
)
from windlass.integrations.portable_run import (
    PortableRun,
    clean_text,
)
from windlass.integrations.run_import import (
    TRACKERS,
    ImportedRun,
    ImportedRuns,
    import_runs,
    write_run,
)
from windlass.integrations.run_mirror import (
    MIRRORS,
    Mirror,
    mirror_run,
)
from windlass.integrations.tracked_run import (
    TrackedRun,
    init,
)

__all__ = [
    "MIRRORS",
    "TRACKERS",
    "Harness",
    "ImportedRun",
    "ImportedRuns",
    "LogSize",
    "Mirror",
    "PortableRun",
    "ReadLog",
    "TrackedRun",
    "clean_text",
    "import_runs",
    "init",
    "load_log_format",
    "log_formats",
    "mirror_run",
    "read_log",
    "task_names",
    "write_run",
]
