"""Four rank processes that all tests of this folder share."""

from collections.abc import Iterator

import pytest

from rank_pool import RankProcesses


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankProcesses]:
    """The processes of any `RankPool` of at most four ranks."""
    four = RankProcesses(4)
    yield four
    four.close()
