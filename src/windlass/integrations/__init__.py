"""Exchanges runs with other trackers and training loops.

`windlass.integrations.transformers`, `lightning` and `lm_eval` are imported by name, because each
needs its package.
"""

from windlass.integrations.harness import (
    Harness,
    task_names,
)
from windlass.integrations.portable_run import (
    PortableRun,
)
from windlass.integrations.run_import import (
    TRACKERS,
    ImportedRun,
    ImportedRuns,
    import_runs,
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
    "Mirror",
    "PortableRun",
    "TrackedRun",
    "import_runs",
    "init",
    "mirror_run",
    "task_names",
]
