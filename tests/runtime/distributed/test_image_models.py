"""A vision transformer whose ranks share the tokens of an image unequally takes the same steps."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from factories import tiny_plan
from rank_pool import BATCH, LAYERS, MACHINE, RankPool
from windlass.data.examples import ExampleDataset

DIALS = {
    "layers": LAYERS - 2, "width": 32, "heads": 4, "patch": 2, "input_shape": (1, 8, 8),
    "classes": 5, "dropout": 0.1,
}  # fmt: skip
POSITIONS = 17
"""The class token and 4 x 4 patches: no two ranks share them equally."""
PLANS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor": 2},
    "pipeline and tensor": {"tensor": 2, "pipeline": 2, "micro": 1, "accumulation": 8},
    "sharded": {"tensor": 2, "data": 2, "sharding": (2, 2), "micro": 2, "accumulation": 2},
    "four": {"tensor": 4, "recompute": "selective"},
    "recomputed": {"tensor": 2, "recompute": "full", "precision": "float32"},
}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    draw = np.random.default_rng(0)
    images = draw.normal(size=(3 * BATCH, 1, 8, 8)).astype(np.float32)
    # Most are of one class, so that a guess is right about some of those held out.
    classes = draw.integers(0, 5, size=len(images)) * (draw.random(len(images)) < 0.4)
    examples = ExampleDataset(inputs=images, targets=classes, held_out=BATCH - 2)
    four = RankPool(
        tmp_path_factory.mktemp("images"), 4, (2, 4), model="vit-tiny", dials=DIALS,
        examples=examples,
    )  # fmt: skip
    yield four
    four.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_images_under_any_tensor_plan_equal_one_device(pool: RankPool, name: str):
    keywords = {"micro": 4, "accumulation": 2, "precision": "float64", "sequence": POSITIONS}
    plan = tiny_plan(pool.graph, MACHINE, **(keywords | PLANS[name]))
    result, run = pool.verify(plan)
    assert result.passed, result.first_mismatch
    alone = pool.last_step(plan.precision)
    assert run.steps[-1].held_out_accuracy == alone.held_out_accuracy
    assert run.steps[-1].held_out_loss == pytest.approx(alone.held_out_loss, rel=1e-6)
