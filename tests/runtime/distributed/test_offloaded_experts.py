"""Replicas that divide experts and offload their state train the model that one device trains."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from factories import tiny_plan
from rank_pool import BATCH, LAYERS, MACHINE, OFFLOADED, SEQUENCE, RankPool, RankProcesses
from windlass.runtime.verify.compare_runs import InstrumentedRun
from windlass.schema import LoraRequest
from windlass.schema.plan import Offload, Plan

pytestmark = pytest.mark.slow

MODEL = f"{Path(__file__).with_name('expert_model.py')}:experts"

PHASES = ((0, 2), (2, 4), (4, LAYERS))
ON_DISK = {"offload": OFFLOADED[0], "stages": (PHASES,), "recompute": "full"}
ON_HOST = {**ON_DISK, "offload": OFFLOADED[1]}

PLANS: dict[str, dict[str, Any]] = {
    "replicas": {"data": 2, "expert": 2, **ON_DISK},
    "experts whole, others sharded": {"data": 2, "expert": 2, "sharding": (2, 2), **ON_HOST},
    "both sharded": {"data": 4, "expert": 2, "sharding": (4, 4), **ON_DISK},
    "pipeline": {
        "data": 2, "expert": 2, "pipeline": 2, "sharding": (2, 2), **ON_DISK,
        "stages": (((0, 1), (1, 3)), ((3, 4), (4, LAYERS))),
    },
    "tensor": {"data": 2, "expert": 2, "tensor": 2, **ON_DISK},
    "state alone": {"data": 2, "expert": 2, "offload": Offload(optimizer="disk")},
    "state alone, ZeRO-1": {
        "data": 4, "expert": 2, "sharding": (1, 4), "offload": Offload(optimizer="host"),
    },
    "state alone, HSDP": {
        "data": 4, "expert": 2, "sharding": (2, 4), "offload": Offload(optimizer="disk"),
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory, ranks: RankProcesses) -> RankPool:
    return RankPool(tmp_path_factory.mktemp("offloaded"), 4, (2,), model=MODEL, processes=ranks)


def plan_of(pool: RankPool, **plan: Any) -> Plan:  # noqa: ANN401  keywords of a plan
    words = {"micro": 1, "precision": "float32", "accumulation": BATCH // plan.get("data", 1)}
    return tiny_plan(pool.graph, MACHINE, sequence=SEQUENCE, **words | plan)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_every_output_gradient_and_weight_is_that_of_one_device(
    pool: RankPool, plan: dict[str, Any]
):
    result, _ = pool.verify(plan_of(pool, **plan))
    assert result.passed, result.first_mismatch


@pytest.mark.parametrize(
    "words",
    [
        PLANS["experts whole, others sharded"],
        PLANS["both sharded"],
        {"data": 2, "expert": 2, "clip": False, **ON_HOST},
    ],
    ids=["experts whole", "both sharded", "not clipped"],
)
def test_phases_change_no_bit_of_what_the_same_ranks_train_in_memory(
    pool: RankPool, words: dict[str, Any]
):
    require_same_bits(pool, words)


def require_same_bits(pool: RankPool, words: dict[str, Any]) -> None:
    kept = {key: value for key, value in words.items() if key not in ("offload", "stages")}
    offloaded, in_memory = (pool.run(plan_of(pool, **plan)) for plan in (words, kept))
    require_same_training(pool, offloaded, in_memory)


def require_same_training(pool: RankPool, run: InstrumentedRun, other: InstrumentedRun) -> None:
    """The same losses, gradient norms and, after the last step, weights, to every bit."""
    numbers, expected = (
        [(step.step, step.loss, step.gradient_norm) for step in each.steps] for each in (run, other)
    )
    assert numbers == expected[-len(numbers) :]
    weights, theirs = weights_of(pool, run), weights_of(pool, other)
    assert weights.keys() == theirs.keys()
    assert [name for name in weights if not torch.equal(weights[name], theirs[name])] == []


def weights_of(pool: RankPool, run: InstrumentedRun) -> dict[str, Tensor]:
    """The weights of all layers after the last step."""
    folder = pool.merged_checkpoint(run, run.steps[-1].step)
    tensors = {
        name: tensor
        for file in sorted(folder.glob("layer-*.safetensors"))
        for name, tensor in load_file(file).items()
        if name.startswith("weight/")
    }
    assert tensors
    return tensors


def test_a_run_on_disk_goes_on_in_memory_and_alone(pool: RankPool):
    begun = pool.run(plan_of(pool, **PLANS["both sharded"]))
    checkpoint, losses = pool.merged_checkpoint(begun, 1), [step.loss for step in begun.steps[1:]]
    resumed = pool.run(plan_of(pool, **PLANS["both sharded"]), resume=checkpoint)
    require_same_training(pool, resumed, begun)
    for plan in (PLANS["state alone"], {"data": 4, "expert": 4}, {"micro": 4, "accumulation": 2}):
        others = pool.run(plan_of(pool, **plan), resume=checkpoint).steps
        assert [step.loss for step in others] == pytest.approx(losses, rel=1e-5)  # float32


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory, ranks: RankProcesses) -> RankPool:
    folder = tmp_path_factory.mktemp("adapted")
    lora = LoraRequest(rank=2, targets=("router", "experts.*", "attention.*"))
    return RankPool(folder, 4, (), model=MODEL, processes=ranks, lora=lora)


@pytest.mark.parametrize("name", ["replicas", "experts whole, others sharded", "both sharded"])
def test_phases_change_no_bit_of_adapters_beside_frozen_experts(adapted: RankPool, name: str):
    require_same_bits(adapted, PLANS[name])
