"""Random plans of the torch stack, for models of every kind, equal one device of the own runtime.

`pytest -m slow tests/engines/torch/test_random_plans.py` runs 56 of them, on 2, 4 and 8 processes,
and prints the table of `docs/guide/many-gpus.md`.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rank_pool import BATCH, LAYERS, RankPool, RankProcesses
from torch_plans import describe, random_plan
from windlass.data.examples import ExampleDataset
from windlass.program.stack_capabilities import capability_faults
from windlass.schema import LoraRequest
from windlass.stacks import load_stack

PLANS = 6
"""Random plans of each model."""

EIGHT = 2
"""Random plans of each model on 8 processes."""

EXPERTS = Path(__file__).parents[2] / "runtime" / "distributed" / "expert_model.py"


def images() -> dict[str, Any]:
    draw = np.random.default_rng(0)
    pixels = draw.normal(size=(3 * BATCH, 1, 8, 8)).astype(np.float32)
    classes = draw.integers(0, 5, size=len(pixels))
    dials = {
        "layers": LAYERS - 2, "width": 32, "heads": 4, "patch": 2, "input_shape": (1, 8, 8),
        "classes": 5, "dropout": 0.1,
    }  # fmt: skip
    examples = ExampleDataset(inputs=pixels, targets=classes, held_out=BATCH - 2)
    return {"model": "vit-tiny", "dials": dials, "examples": examples}


MODELS: dict[str, Callable[[], dict[str, Any]]] = {
    "gpt, tied embeddings, dropout": dict,
    "llama, grouped heads": lambda: {
        "model": "llama-tiny",
        "dials": {
            "layers": LAYERS - 2, "width": 32, "heads": 8, "kv_heads": 4, "sequence": 48,
            "vocabulary": 300,
        },
    },
    "bert": lambda: {"model": "bert-tiny"},
    "vit": images,
    "mixture of experts": lambda: {"model": "moe-tiny", "width": 96},
    "a file's own blocks, with experts": lambda: {"model": f"{EXPERTS}:experts"},
    "gpt with LoRA": lambda: {"lora": LoraRequest(rank=2)},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_random_plans_equal_a_single_device(
    name: str,
    tmp_path: Path,
    ranks: RankProcesses,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = MODELS[name]()
    pool = RankPool(tmp_path, 4, (2, 4), processes=ranks, **words)
    rows = require_equal(name, pool, PLANS, (2, 4))
    with capsys.disabled():
        print("", *rows, sep="\n")


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_random_plans_of_eight_processes_equal_a_single_device(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = RankPool(tmp_path, 8, (2, 4), **MODELS[name]())
    try:
        rows = require_equal(name, pool, EIGHT, (8,))
    finally:
        pool.close()
    with capsys.disabled():
        print("", *rows, sep="\n")


def require_equal(name: str, pool: RankPool, plans: int, processes: tuple[int, ...]) -> list[str]:
    """Requires that random plans equal a single device; a row of the table for each."""
    draw, rows = random.Random(f"{name}{processes if 8 in processes else ''}"), []
    for _ in range(plans):
        plan = random_plan(draw, pool, processes)
        assert not list(capability_faults(plan, load_stack("torch")))
        result, run = pool.verify(plan)
        assert result.passed, f"{describe(plan)}: {result.first_mismatch}"
        last, expected = run.steps[-1], pool.last_step(plan.precision)
        assert last.task_scores == pytest.approx(dict(expected.task_scores), rel=1e-5)
        worst = {each.quantity: each.error for each in result.comparisons}
        errors = f"{worst['loss']:.0e} | {worst['weight']:.0e}"
        rows.append(f"| {name} | {describe(plan)} | {errors} |")
    return rows
