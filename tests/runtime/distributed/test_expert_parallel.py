"""Replicas that divide experts train the model that one device trains, and that a loop does."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from factories import tiny_plan
from rank_pool import BATCH, MACHINE, SEQUENCE, SETTINGS, RankPool, RankProcesses
from windlass.data.examples import IGNORED_TARGET, ExampleBatches, ExampleDataset
from windlass.models.build import build_layer_stack
from windlass.models.experts.mixture import MixtureOfExperts
from windlass.models.layer_stack import LayerStack, materialize_layer
from windlass.runtime.verify.compare_runs import InstrumentedRun
from windlass.runtime.verify.plain_loop.training import PlainRun, train_plainly
from windlass.schema.plan import Plan
from windlass.schema.tensor_grid import TensorGrid

TOLERANCE = 1e-12
"""Relative, in float64: three steps of a dozen layers round some thousand sums of 1e-16 each."""

UPDATED = 1e-8
"""Relative, after an update: AdamW divides by roots of small moments, in another order of steps
than torch's own."""

pytestmark = pytest.mark.slow

MODEL = f"{Path(__file__).with_name('expert_model.py')}:experts"

PLANS: dict[str, dict[str, Any]] = {
    "two": {"data": 2, "expert": 2, "micro": 2, "accumulation": 2},
    "four": {"data": 4, "expert": 4, "micro": 1, "accumulation": 2, "sharding": (1, 2)},
}

MORE_PLANS: dict[str, dict[str, Any]] = {
    "two groups": {"data": 4, "expert": 2, "micro": 2},
    "pipeline": {"data": 2, "expert": 2, "micro": 1, "accumulation": 4, "pipeline": 2},
    "recompute": {"data": 2, "expert": 2, "micro": 2, "accumulation": 2, "recompute": "full"},
    "selective recompute": {
        "data": 4, "expert": 2, "micro": 1, "accumulation": 2, "recompute": "selective",
    },
    "selective recompute, sharded and cut": {
        "data": 2, "expert": 2, "micro": 1, "accumulation": 4, "recompute": "selective",
        "sharding": (2, 2), "pipeline": 2,
    },
    "zero-bubble": {
        "data": 2, "expert": 2, "micro": 1, "accumulation": 4, "pipeline": 2,
        "schedule": "zero-bubble",
    },
    "ZeRO-1": {"data": 4, "expert": 2, "micro": 1, "accumulation": 2, "sharding": (1, 4)},
    "HSDP": {"data": 4, "expert": 2, "micro": 1, "accumulation": 2, "sharding": (2, 4)},
    "FSDP": {"data": 4, "expert": 2, "micro": 1, "accumulation": 2, "sharding": (4, 4)},
    "FSDP of all": {"data": 4, "expert": 4, "micro": 1, "accumulation": 2, "sharding": (4, 4)},
    "tensor": {"tensor": 2, "micro": 2, "accumulation": 4},
    "grid": {"tensor": TensorGrid(2, 2), "micro": 2, "accumulation": 4},
    "grid, experts and FSDP": {
        "tensor": TensorGrid(1, 2), "data": 2, "expert": 2, "micro": 2, "accumulation": 2,
        "sharding": (2, 2), "recompute": "selective",
    },
    "tensor, experts and FSDP": {
        "tensor": 2, "data": 2, "expert": 2, "micro": 2, "accumulation": 2, "sharding": (2, 2),
    },
    "tensor, pipeline and recompute": {
        "tensor": 2, "pipeline": 2, "micro": 2, "accumulation": 4, "recompute": "full",
    },
    "sequences": {"context": 2, "micro": 2, "accumulation": 4},
    "sequences and experts": {"context": 2, "expert": 2, "micro": 4, "accumulation": 2},
    "experts over sequences": {"context": 2, "data": 2, "expert": 4, "micro": 2, "accumulation": 2},
    "sequences over experts": {
        "context": 4, "expert": 2, "micro": 2, "accumulation": 4, "sharding": (2, 4),
    },
    "sequences, tensor and selective": {
        "context": 2, "tensor": 2, "micro": 2, "accumulation": 4, "recompute": "selective",
    },
    "sequences and zero-bubble": {
        "context": 2, "pipeline": 2, "micro": 1, "accumulation": 8, "schedule": "zero-bubble",
    },
}  # fmt: skip


def examples_of_unequal_counts() -> ExampleDataset:
    """Examples with 0 to 16 targets, half of them without any; nine are held out."""
    random = np.random.default_rng(5)
    inputs, targets = random.integers(0, 250, (2, 33, SEQUENCE))
    counts = random.permutation([0] * 16 + [16, 16] + list(range(1, 16)))
    for row, count in zip(targets, counts.tolist(), strict=True):
        row[random.permutation(SEQUENCE)[count:]] = IGNORED_TARGET
    return ExampleDataset(inputs=inputs, targets=targets, held_out=9)


EXAMPLES = examples_of_unequal_counts()
BATCHES = ExampleBatches(EXAMPLES, batch=BATCH, seed=3)


class DenseLoop(MixtureOfExperts):
    """The same mixture: every expert computes every token, and counts by its weight there."""

    def forward(self, x: Tensor) -> Tensor:
        routing = self.router(x)
        rows, experts = x.flatten(0, 1), self.experts
        total = torch.zeros_like(rows)
        for number, (up, down) in enumerate(
            zip(experts.up.weight, experts.down.weight, strict=True)
        ):
            y = functional.gelu(rows @ up.T, approximate="tanh") @ down.T
            weight = (routing.weights * (routing.experts == number)).sum(-1, keepdim=True)
            total = total + weight * y
        return total.view_as(x)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory, ranks: RankProcesses) -> RankPool:
    return RankPool(
        tmp_path_factory.mktemp("experts"),
        4,
        (2, TensorGrid(2, 2), TensorGrid(1, 2)),
        model=MODEL,
        examples=EXAMPLES,
        processes=ranks,
    )


def plan_of(pool: RankPool, **plan: Any) -> Plan:  # noqa: ANN401  keywords of a plan
    return tiny_plan(pool.graph, MACHINE, sequence=SEQUENCE, precision="float64", **plan)


@pytest.fixture(scope="module")
def plain(pool: RankPool) -> PlainRun:
    """A loop in plain PyTorch over all samples at once, whose experts are a loop too."""

    def tensors(arrays: tuple[np.ndarray, np.ndarray]) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(arrays[0]), torch.from_numpy(arrays[1])

    held_out = next(BATCHES.held_out_batches(SETTINGS.evaluate_sequences, 6))
    batches = SimpleNamespace(
        batch=BATCH, samples=lambda step: tensors(BATCHES.samples(step)),
        held_out_samples=lambda _: (*tensors(held_out), 1),
        documents=lambda _: None, held_out_documents=lambda _: None,
    )  # fmt: skip
    stack = build_layer_stack(MODEL, pool.dials, device="meta", seed=SETTINGS.seed)
    layers = [(name, as_loop(stack, index)) for index, name in enumerate(stack.names)]
    return train_plainly(layers, batches, SETTINGS, micro=BATCH, dtype=torch.float64)


def as_loop(stack: LayerStack, index: int) -> nn.Module:
    layer = materialize_layer(stack, index, seed=SETTINGS.seed, device="cpu")
    for module in layer.modules():
        if isinstance(module, MixtureOfExperts):
            module.__class__ = DenseLoop
    return layer


def require_plain(run: InstrumentedRun, plain: PlainRun) -> None:
    steps = run.steps
    assert steps[0].loss == pytest.approx(plain.losses[0], rel=TOLERANCE)
    assert steps[0].gradient_norm == pytest.approx(plain.gradient_norms[0], rel=TOLERANCE)
    assert [step.loss for step in steps] == pytest.approx(plain.losses, rel=UPDATED)
    norms = [step.gradient_norm for step in steps]
    assert norms == pytest.approx(plain.gradient_norms, rel=UPDATED)
    assert steps[-1].held_out_loss == pytest.approx(plain.held_out_loss, rel=UPDATED)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_ranks_that_divide_experts_train_as_a_dense_loop_does(
    pool: RankPool, plain: PlainRun, plan: dict[str, Any]
):
    require_plain(pool.run(plan_of(pool, **plan)), plain)


@pytest.mark.parametrize("plan", MORE_PLANS.values(), ids=MORE_PLANS)
def test_so_they_do_sharded_cut_and_recomputed(
    pool: RankPool, plain: PlainRun, plan: dict[str, Any]
):
    require_plain(pool.run(plan_of(pool, **plan)), plain)


@pytest.mark.parametrize("plan", [*PLANS.values(), *MORE_PLANS.values()])
def test_every_output_gradient_and_weight_is_that_of_one_device(
    pool: RankPool, plan: dict[str, Any]
):
    result, run = pool.verify(plan_of(pool, **plan))
    assert result.passed, result.first_mismatch
    alone = pool.single_device_run("float64").steps
    for step, expected in zip(run.steps, alone, strict=True):
        assert step.loss == pytest.approx(expected.loss, rel=TOLERANCE)
        assert step.gradient_norm == pytest.approx(expected.gradient_norm, rel=TOLERANCE)
        assert step.held_out_loss == pytest.approx(expected.held_out_loss, rel=TOLERANCE)


def test_without_clipping_every_expert_counts_in_the_norm_once(pool: RankPool):
    alone = pool.run(plan_of(pool, micro=4, accumulation=2, clip=False)).steps
    plan = plan_of(pool, data=4, expert=2, micro=1, accumulation=2, clip=False)
    norms = [step.gradient_norm for step in pool.run(plan).steps]
    assert norms == pytest.approx([step.gradient_norm for step in alone], rel=TOLERANCE)


def test_a_run_of_two_expert_ranks_goes_on_with_four_and_with_one(pool: RankPool):
    begun = pool.run(plan_of(pool, **PLANS["two"]))
    checkpoint, losses = pool.merged_checkpoint(begun, 1), [step.loss for step in begun.steps[1:]]
    others = MORE_PLANS["FSDP"], MORE_PLANS["tensor, experts and FSDP"]
    for plan in ({"micro": 4, "accumulation": 2}, PLANS["four"], *others):
        resumed = pool.run(plan_of(pool, **plan), resume=checkpoint).steps
        assert [step.step for step in resumed] == [2, 3]
        assert [step.loss for step in resumed] == pytest.approx(losses, rel=TOLERANCE)


@pytest.fixture(scope="module")
def full_pool(tmp_path_factory: pytest.TempPathFactory, ranks: RankProcesses) -> RankPool:
    """Experts have room for 0.6 times an equal share of a sequence's choices."""
    dials = {
        "layers": 4, "width": 32, "heads": 8, "sequence": 48, "vocabulary": 300, "capacity": 0.6,
    }  # fmt: skip
    folder = tmp_path_factory.mktemp("full")
    return RankPool(folder, 4, (2,), model=MODEL, examples=EXAMPLES, processes=ranks, dials=dials)


@pytest.mark.parametrize("name", [name for name in MORE_PLANS if "sequences" in name])
def test_ranks_that_divide_sequences_drop_the_choices_that_one_device_drops(
    full_pool: RankPool, name: str
):
    result, run = full_pool.verify(plan_of(full_pool, **MORE_PLANS[name]))
    assert result.passed, result.first_mismatch
    alone = full_pool.single_device_run("float64").steps
    losses = [step.loss for step in alone]
    assert [step.loss for step in run.steps] == pytest.approx(losses, rel=TOLERANCE)
