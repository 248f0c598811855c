"""Linear layers that multiply 8-bit factors take the same steps under every plan."""

from pathlib import Path
from typing import Any

import pytest
import torch

from factories import tiny_plan
from rank_pool import BATCH, LAYERS, MACHINE, OFFLOADED, SEQUENCE, SETTINGS, RankPool, RankProcesses
from windlass.runtime.verify.compare_runs import InstrumentedRun, compare_to_single_device
from windlass.schema import LoraRequest

PHASES = ((0, 2), (2, 4), (4, LAYERS))
PLANS: dict[str, dict[str, Any]] = {
    "data": {"micro": 2, "accumulation": 2, "data": 2},
    "sharded": {"micro": 1, "accumulation": 4, "data": 2, "sharding": (2, 2)},
    "pipeline": {"micro": 1, "accumulation": 8, "pipeline": 2},
    "zero-bubble": {"micro": 2, "accumulation": 4, "pipeline": 2, "schedule": "zero-bubble"},
    "tensor": {"micro": 2, "accumulation": 4, "tensor": 2},
    "selective": {"micro": 4, "accumulation": 2, "recompute": "selective"},
    "phases": {
        "micro": 4, "accumulation": 2, "recompute": "full", "precision": "float32",
        "offload": OFFLOADED[0], "stages": (PHASES,),
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory, ranks: RankProcesses) -> RankPool:
    return RankPool(tmp_path_factory.mktemp("float8"), 2, (2,), processes=ranks)


def run(pool: RankPool, **plan: Any) -> InstrumentedRun:  # noqa: ANN401  keywords of a plan
    keywords = {"precision": "float64", "sequence": SEQUENCE} | plan
    given = tiny_plan(pool.graph, MACHINE, **keywords)
    return pool.run(given.model_copy(update={"products": "float8"}), settings=SETTINGS)


@pytest.mark.parametrize(
    "name",
    [
        "tensor",
        *(pytest.param(name, marks=pytest.mark.slow) for name in PLANS if name != "tensor"),
    ],
)
def test_float8_under_any_plan_equals_one_device(pool: RankPool, name: str):
    plan = PLANS[name]
    precision = plan.get("precision", "float64")
    micro = plan["micro"] if precision == "float32" else 1
    alone = run(pool, micro=micro, accumulation=BATCH // micro, precision=precision)
    result = compare_to_single_device(
        run(pool, **plan), alone, pool.stack, SETTINGS, precision=precision
    )
    assert result.passed, result.first_mismatch
    exact = pool.run(
        tiny_plan(pool.graph, MACHINE, micro=1, accumulation=BATCH, precision="float64",
                  sequence=SEQUENCE),
        settings=SETTINGS,
    )  # fmt: skip
    error = torch.tensor(
        [a.loss / b.loss - 1 for a, b in zip(alone.steps, exact.steps, strict=True)]
    )
    assert error.abs().max() > 1e-7  # the factors are rounded


@pytest.mark.slow
def test_adapters_beside_float8_products_equal_one_device(tmp_path: Path):
    two = RankPool(tmp_path, 2, (2,), lora=LoraRequest(rank=4))
    try:
        alone = run(two, micro=1, accumulation=BATCH)
        divided = run(two, micro=2, accumulation=4, tensor=2)
        result = compare_to_single_device(divided, alone, two.stack, SETTINGS, precision="float64")
        assert result.passed, result.first_mismatch
    finally:
        two.close()
