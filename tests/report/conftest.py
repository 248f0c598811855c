"""The factory of the runs that pages and tables are drawn from."""

from collections.abc import Callable
from pathlib import Path

import pytest

from report.made_runs import make_record
from windlass.tracking import RunRecord


@pytest.fixture
def record(tmp_path: Path) -> Callable[..., RunRecord]:
    """Makes runs; see `make_record`."""

    def make(**changes: object) -> RunRecord:
        return make_record(tmp_path, **changes)  # type: ignore[arg-type]

    return make
