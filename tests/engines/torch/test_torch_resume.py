"""A run goes on from its checkpoint on another mesh, and under the other stack."""

import random

import pytest

from factories import tiny_plan
from rank_pool import BATCH, MACHINE, RankPool, slow
from torch_plans import describe, random_plan, torch_plan
from windlass.schema.plan import Plan

ROUNDING = 1e-9


def own_plan(pool: RankPool, *, data: int = 1, tensor: int = 1) -> Plan:
    return tiny_plan(
        pool.graph, MACHINE, data=data, tensor=tensor, micro=1, accumulation=BATCH // data,
        sequence=pool.sequence, precision="float64",
    )  # fmt: skip


def require_resumed(pool: RankPool, before: Plan, after: Plan) -> None:
    """Requires that a plan goes on, from what another one saved, as one device would."""
    saved = pool.merged_checkpoint(pool.run(before), 1)
    resumed = pool.run(after, resume=saved)
    expected = pool.single_device_run("float64").steps[1:]
    for step, other in zip(resumed.steps, expected, strict=True):
        assert step.loss == pytest.approx(other.loss, rel=ROUNDING)
        assert step.gradient_norm == pytest.approx(other.gradient_norm, rel=ROUNDING)
        assert step.held_out_loss == (
            None if other.held_out_loss is None else pytest.approx(other.held_out_loss, rel=1e-9)
        )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("torch, 2 shards", "own, one device"),
        ("own, one device", "torch, 2 stages"),
        slow("own, 2 tensor-parallel ranks", "torch, 2 shards"),
        slow("torch, 2 stages", "torch, 2 shards"),
    ],
)
def test_a_run_goes_on_under_the_other_stack(pool: RankPool, before: str, after: str) -> None:
    plans = {
        "own, one device": own_plan(pool),
        "own, 2 tensor-parallel ranks": own_plan(pool, tensor=2),
        "torch, 2 shards": torch_plan(pool, data=2, sharding=(2, 2)),
        "torch, 2 stages": torch_plan(pool, pipeline=2),
    }
    require_resumed(pool, plans[before], plans[after])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_a_run_goes_on_on_another_mesh(pool: RankPool, seed: int) -> None:
    draw = random.Random(seed)
    before, after = (
        random_plan(draw, pool).model_copy(update={"precision": "float64"}) for _ in range(2)
    )
    print(describe(before), "->", describe(after))
    require_resumed(pool, before, after)
