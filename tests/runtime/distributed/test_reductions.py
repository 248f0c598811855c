"""Each sum over ranks that only some plans have: what is left out of it is noticed in seconds."""

from typing import Any

import pytest

from factories import tiny_plan
from rank_pool import BATCH, MACHINE, SEQUENCE, SETTINGS, RankPool, RankProcesses
from windlass.schema import LoraRequest
from windlass.schema.sparsity import SparsityRequest
from windlass.schema.train_request import TrainSettings


def assert_equal_to_one_device(
    pool: RankPool,
    settings: TrainSettings = SETTINGS,
    **degrees: Any,  # noqa: ANN401  keywords of a plan
) -> None:
    plan = tiny_plan(
        pool.graph, MACHINE, micro=1, accumulation=BATCH // degrees.get("data", 1),
        sequence=SEQUENCE, precision="float64", **degrees,
    )  # fmt: skip
    result, _ = pool.verify(plan, settings=settings)
    assert result.passed, result.first_mismatch


def test_copies_of_a_shard_have_the_sum_of_all_gradients(pool: RankPool) -> None:
    assert_equal_to_one_device(pool, data=4, sharding=(2, 2))


@pytest.mark.parametrize("sharding", [(2, 2), (1, 2)], ids=str)
def test_averages_of_shards_are_evaluated_as_those_of_whole_weights(
    pool: RankPool, sharding: tuple[int, int]
) -> None:
    settings = SETTINGS.model_copy(update={"ema": 0.7, "evaluate_every": 2})
    assert_equal_to_one_device(pool, settings, data=2, sharding=sharding)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, ranks: RankProcesses) -> RankPool:
    folder = tmp_path_factory.mktemp("adapters")
    return RankPool(folder, 2, (2,), processes=ranks, lora=LoraRequest(rank=2))


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory, ranks: RankProcesses) -> RankPool:
    sparsity = SparsityRequest(level=0.75, block=16, schedule="rigl", every=1)
    folder = tmp_path_factory.mktemp("sparse")
    return RankPool(folder, 2, (2,), width=128, processes=ranks, sparsity=sparsity)


@pytest.mark.parametrize("degrees", [{"tensor": 2}, {"data": 2}], ids=str)
def test_both_factors_of_an_adapter_have_the_sum_of_all_gradients(
    adapters: RankPool, degrees: dict[str, int]
) -> None:
    assert_equal_to_one_device(adapters, **degrees)


@pytest.mark.parametrize(
    "degrees", [{"data": 2}, pytest.param({"tensor": 2}, marks=pytest.mark.slow)], ids=str
)
def test_masks_follow_the_scores_of_all_replicas(sparse: RankPool, degrees: dict[str, int]) -> None:
    assert_equal_to_one_device(sparse, **degrees)
