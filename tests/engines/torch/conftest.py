"""Rank processes that the tests of this folder share."""

from collections.abc import Iterator

import pytest

from rank_pool import RankPool, RankProcesses


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankProcesses]:
    """The processes of any `RankPool` of at most four ranks."""
    four = RankProcesses(4)
    yield four
    four.close()


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory, ranks: RankProcesses) -> RankPool:
    """A GPT of four blocks with tensor-parallel degrees 2 and 4."""
    return RankPool(tmp_path_factory.mktemp("torch"), 4, (2, 4), processes=ranks)
