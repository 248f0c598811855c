"""Rank processes that all tests of this folder share, and the models that most of them train."""

from collections.abc import Iterator

import pytest

from rank_pool import RankPool, RankProcesses
from windlass.schema.tensor_grid import TensorGrid


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankProcesses]:
    """The processes of any `RankPool` of at most four ranks."""
    four = RankProcesses(4)
    yield four
    four.close()


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory, ranks: RankProcesses) -> RankPool:
    """A GPT of four blocks with tensor-parallel degrees 2 and 2x2."""
    folder = tmp_path_factory.mktemp("pool")
    return RankPool(folder, 4, (2, TensorGrid(2, 2)), processes=ranks)


@pytest.fixture(scope="session")
def encoders(tmp_path_factory: pytest.TempPathFactory, ranks: RankProcesses) -> RankPool:
    """A BERT of four blocks with tensor-parallel degree 2x2."""
    return RankPool(
        tmp_path_factory.mktemp("encoders"), 4, (TensorGrid(2, 2),), model="bert-tiny",
        processes=ranks,
    )  # fmt: skip


@pytest.fixture(scope="module")
def wide_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Eight processes, and the same GPT with degrees 2, 4 and 8, and in grids."""
    grids = (TensorGrid(2, 2), TensorGrid(4, 2), TensorGrid(2, 4), TensorGrid(1, 4))
    eight = RankPool(tmp_path_factory.mktemp("wide"), 8, (2, 4, 8, *grids))
    yield eight
    eight.close()
