"""Adapters on several ranks, whose frozen weights are offloaded, beside those on one device."""

from typing import Any

import pytest

from factories import tiny_plan
from rank_pool import BATCH, LAYERS, MACHINE, OFFLOADED, SEQUENCE, RankPool, RankProcesses
from windlass.schema import LoraRequest
from windlass.schema.plan import Offload

PHASES = ((0, 2), (2, 4), (4, LAYERS))
IN_PHASES = {"offload": OFFLOADED[0], "stages": (PHASES,), "recompute": "full"}
PLANS: dict[str, dict[str, Any]] = {
    "replicas": {"data": 2, **IN_PHASES},
    "sharded": {"data": 2, "sharding": (2, 2), **IN_PHASES},
    "on the host": {"data": 2, "sharding": (2, 2), **IN_PHASES, "offload": OFFLOADED[1]},
    "tensor": {"tensor": 2, **IN_PHASES},
    "pipeline": {
        "pipeline": 2, **IN_PHASES, "stages": (((0, 1), (1, 3)), ((3, 4), (4, LAYERS))),
    },
    "state alone": {"data": 2, "sharding": (1, 2), "offload": Offload(optimizer="disk")},
}  # fmt: skip


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory, ranks: RankProcesses) -> RankPool:
    folder, lora = tmp_path_factory.mktemp("frozen"), LoraRequest(rank=2)
    return RankPool(folder, 2, (2,), processes=ranks, lora=lora)


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_offloaded_frozen_weights_of_several_ranks_give_the_steps_of_one_device(
    pool: RankPool, name: str
):
    words = PLANS[name]
    plan = tiny_plan(
        pool.graph, MACHINE, micro=2, accumulation=BATCH // 2 // words.get("data", 1),
        sequence=SEQUENCE, precision="float32", **words,
    )  # fmt: skip
    result, _ = pool.verify(plan)
    assert result.passed, result.first_mismatch
