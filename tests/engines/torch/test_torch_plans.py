"""Plans of the torch stack train a model as the own runtime does on a single device."""

import pytest

from rank_pool import RankPool, slow
from torch_plans import torch_plan


@pytest.mark.parametrize(
    "degrees",
    [
        {"data": 2, "sharding": (2, 2)},
        {"tensor": 2},
        {"pipeline": 2},
        slow({"data": 2}),
        slow({"data": 2, "sharding": (2, 2), "micro": 4}),
        slow({"data": 2, "sharding": (2, 2), "reshard": True}),
        slow({"data": 2, "sharding": (2, 2), "recompute": "full"}),
        slow({"data": 2, "sharding": (2, 2), "recompute": "selective", "recompute_layers": 2}),
        slow({"data": 2, "sharding": (2, 2), "precision": "float32"}),
        slow({"data": 2, "sharding": (2, 2), "precision": "bfloat16"}),
        slow({"data": 4, "sharding": (2, 2)}),
        slow({"data": 2, "tensor": 2, "sharding": (2, 2)}),
        slow({"tensor": 4}),
        slow({"pipeline": 2, "tensor": 2}),
        slow({"pipeline": 2, "data": 2}),
        slow({"pipeline": 2, "data": 2, "sharding": (2, 2)}),
        slow({"pipeline": 2, "data": 2, "sharding": (2, 2), "reshard": True}),
        slow({"pipeline": 2, "schedule": "gpipe", "recompute": "full"}),
        slow({"pipeline": 2, "schedule": "interleaved", "virtual_stages": 2}),
        slow(
            {
                "pipeline": 2,
                "data": 2,
                "sharding": (2, 2),
                "schedule": "interleaved",
                "virtual_stages": 2,
            }
        ),
        slow(
            {
                "pipeline": 2,
                "data": 2,
                "sharding": (2, 2),
                "schedule": "interleaved",
                "virtual_stages": 2,
                "reshard": True,
            }
        ),
        slow({"pipeline": 4, "micro": 4}),
        slow({"data": 2, "sharding": (2, 2), "compiled": True}),
        slow({"context": 2}),
        slow({"context": 2, "data": 2, "sharding": (2, 2)}),
        slow({"context": 2, "tensor": 2, "sharding": (2, 2), "recompute": "full"}),
        slow({"context": 2, "pipeline": 2, "sharding": (1, 1)}),
        slow({"pipeline": 2, "micro": 8}),
        slow({"pipeline": 2, "clip": False}),
    ],
    ids=str,
)
def test_two_ranks_equal_a_single_device(pool: RankPool, degrees: dict) -> None:
    result, _ = pool.verify(torch_plan(pool, **degrees))
    assert result.passed, result.first_mismatch
