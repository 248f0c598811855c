"""Writes a run to a project of Trackio by its package; the id of each row keeps it from repeats."""

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path

from windlass.errors import RecordError, RequestError
from windlass.integrations.portable_run import PortableRun


def write_trackio(run: PortableRun, place: str, _documents: Mapping[str, Path]) -> str:
    """Writes a run to the project `place` in Trackio's own folder, and returns both names.

    Trackio takes `TRACKIO_DIR` as its folder. It ignores rows whose id it has.

    Raises:
        RequestError: trackio is not installed.
        RecordError: this version of Trackio has no such store, or refuses the project's name.
    """
    try:
        storage = import_module("trackio.sqlite_storage").SQLiteStorage
    except ImportError:
        raise RequestError(
            "`trackio:` needs Trackio; install it by `pip install trackio`"
        ) from None
    names = [f"{run.origin_id}\0{index}" for index in range(len(run.rows))]
    try:
        storage.validate_project_name(place)
        storage.bulk_log(
            project=place,
            run=run.name,
            metrics_list=[dict(row.values) for row in run.rows],
            steps=[row.step for row in run.rows],
            timestamps=[datetime.fromtimestamp(row.time, tz=UTC).isoformat() for row in run.rows],
            config={**run.config, "_Group": run.group},
            log_ids=[hashlib.sha256(name.encode()).hexdigest()[:32] for name in names],
            run_id=run.origin_id,
        )
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise RecordError(f"Trackio refuses the run for `{place}`: {error}") from None
    return f"{place}/{run.name}"
