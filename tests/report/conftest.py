"""The factory of runs that page and tables are drawn from."""

from collections.abc import Callable
from pathlib import Path

import pytest

from report.made_runs import make_record
from windlass.tracking import Record


@pytest.fixture
def record(tmp_path: Path) -> Callable[..., Record]:
    """Makes runs; see `make_record`."""

    def make(**changes: object) -> Record:
        return make_record(tmp_path, **changes)  # type: ignore[arg-type]

    return make
