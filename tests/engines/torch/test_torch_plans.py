"""Plans of the torch stack train a model as the own runtime does on a single device."""

from typing import Any

import pytest

from factories import tiny_plan
from rank_pool import BATCH, MACHINE, RankPool, slow
from windlass.schema.plan import Plan

_LEAST = {"sequence": 16, "precision": "float64"}


def torch_plan(pool: RankPool, *, micro: int = 1, data: int = 1, **degrees: Any) -> Plan:  # noqa: ANN401  handed on to the factory
    plan = tiny_plan(
        pool.graph, MACHINE, micro=micro, data=data, accumulation=BATCH // data // micro,
        **{**_LEAST, "sequence": pool.sequence, **degrees},
    )  # fmt: skip
    return plan.model_copy(update={"stack": "torch"})


@pytest.mark.parametrize(
    "degrees",
    [
        {"data": 2, "sharding": (2, 2)},
        {"tensor": 2},
        {"pipeline": 2},
    ],
    ids=str,
)
def test_two_ranks_equal_a_single_device(pool: RankPool, degrees: dict) -> None:
    result, _ = pool.verify(torch_plan(pool, **degrees))
    assert result.passed, result.first_mismatch
