"""Random plans of the torch stack, for models of every kind, equal one device of the own runtime.

`pytest -m slow tests/engines/torch/test_random_plans.py` runs 42 of them, on 2 and 4 processes, and
prints the table of `docs/guide/many-gpus.md`.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from factories import tiny_plan
from rank_pool import BATCH, LAYERS, MACHINE, RankPool, RankProcesses, divisors, parallel_degrees
from windlass.data.examples import ExampleDataset
from windlass.program.stack_capabilities import capability_faults
from windlass.schema import LoraRequest
from windlass.schema.plan import Plan
from windlass.stacks import load_stack

PLANS = 6
"""Random plans of each model."""

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


def random_plan(draw: random.Random, pool: RankPool) -> Plan:
    """Any plan that the stack's `can` admits, for 2 or 4 processes."""
    degrees = tuple(pool.graph.tensor_shards)
    pipeline, tensor, data = draw.choice(list(parallel_degrees(draw.choice((2, 4)), degrees)))
    sharded = draw.choice(divisors(data))
    micro = draw.choice([m for m in (1, 2, 4) if BATCH // data % m == 0])
    accumulation = BATCH // data // micro
    schedule, chunks = draw.choice(("1f1b", "gpipe")), 1
    if pipeline == 2 and accumulation % pipeline == 0 and draw.random() < 0.5:
        schedule, chunks = "interleaved", 2
    plan = tiny_plan(
        pool.graph, MACHINE, pipeline=pipeline, tensor=tensor, data=data, micro=micro,
        accumulation=accumulation, sequence=pool.sequence, sharding=(sharded, sharded),
        schedule=schedule, virtual_stages=chunks,
        recompute=draw.choice(("none", "full", "selective")),
        recompute_layers=draw.choice((None, 1, 2)),
        precision=draw.choice(("float64", "float64", "float32")),
    )  # fmt: skip
    reshard = True if sharded > 1 and draw.random() < 0.5 else None
    sharding = plan.sharding.model_copy(update={"reshard": reshard})
    return plan.model_copy(update={"stack": "torch", "sharding": sharding})


def describe(plan: Plan) -> str:
    """A plan in few words."""
    parallel, shard = plan.parallel, plan.sharding.parameters
    parts = [f"pp {parallel.pipeline}", f"replicas {parallel.data // shard}", f"shards {shard}"]
    parts += [f"tp {parallel.tensor}", f"{plan.batch.accumulation} x {plan.batch.micro}"]
    parts += [parallel.schedule] if parallel.pipeline > 1 else []
    parts += ["reshard"] if plan.sharding.reshard else []
    parts += [plan.recompute] if plan.recompute != "none" else []
    return ", ".join((*parts, plan.precision))


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
    draw, rows = random.Random(name), []
    for _ in range(PLANS):
        plan = random_plan(draw, pool)
        assert not list(capability_faults(plan, load_stack("torch")))
        result, run = pool.verify(plan)
        assert result.passed, f"{describe(plan)}: {result.first_mismatch}"
        last, expected = run.steps[-1], pool.last_step(plan.precision)
        assert last.task_scores == pytest.approx(dict(expected.task_scores), rel=1e-5)
        worst = {each.quantity: each.error for each in result.comparisons}
        errors = f"{worst['loss']:.0e} | {worst['weight']:.0e}"
        rows.append(f"| {name} | {describe(plan)} | {errors} |")
    with capsys.disabled():
        print("", *rows, sep="\n")
