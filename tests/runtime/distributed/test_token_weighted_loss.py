"""The loss is a mean over the targets of the global batch, however a plan divides them."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from factories import tiny_plan
from rank_pool import BATCH, LAYERS, MACHINE, OFFLOADED, SEQUENCE, SETTINGS, RankPool, RankProcesses
from windlass.data.examples import IGNORED_TARGET, ExampleBatches, ExampleDataset, weight_bits
from windlass.models.build import build_layer_stack
from windlass.runtime.verify.compare_runs import InstrumentedRun
from windlass.runtime.verify.plain_loop.training import PlainRun, train_plainly
from windlass.schema.graph import Precision

TOLERANCE = 1e-12
"""Relative, in float64: three steps of a dozen layers round some thousand sums of 1e-16 each."""

PLAIN_TOLERANCE = 1e-8
"""Relative: the keyed dropout grows what it keeps by a float32, the plain loop by a float64."""

PHASES = tuple((first, first + LAYERS // 3) for first in range(0, LAYERS, LAYERS // 3))

PLANS: dict[str, dict[str, Any]] = {
    "1x8": {"micro": 1, "accumulation": 8},
    "fewer-at-once": {"micro": 2, "accumulation": 4, "schedule": "gpipe", "recompute": "full"},
    "data": {"micro": 2, "accumulation": 2, "data": 2},
    "sharded": {"micro": 1, "accumulation": 4, "data": 2, "sharding": (2, 2)},
    "pipeline": {"micro": 1, "accumulation": 8, "pipeline": 2},
    "zero-bubble": {"micro": 2, "accumulation": 4, "pipeline": 2, "schedule": "zero-bubble"},
    "tensor": {"micro": 2, "accumulation": 4, "tensor": 2},
}
QUICK = ("sharded", "zero-bubble", "tensor")


def examples_of_unequal_counts() -> ExampleDataset:
    """Examples with 0 to 16 targets; half of them have none, and two have all."""
    random = np.random.default_rng(5)
    inputs = random.integers(0, 250, (30, SEQUENCE))
    targets = random.integers(0, 250, (30, SEQUENCE))
    counts = random.permutation([0] * 15 + [16, 16] + list(range(1, 14)))
    for row, count in zip(targets, counts.tolist(), strict=True):
        row[random.permutation(SEQUENCE)[count:]] = IGNORED_TARGET
    return ExampleDataset(inputs=inputs, targets=targets, held_out=6)


def with_weights(examples: ExampleDataset) -> ExampleDataset:
    """The same examples, of whose targets each counts by a fraction of its own."""
    shape = examples.targets.shape
    weights = np.random.default_rng(6).uniform(0.1, 2.0, shape).astype(np.float32)
    both = np.stack((examples.targets, weight_bits(weights)), axis=1)
    return ExampleDataset(inputs=examples.inputs, targets=both, held_out=examples.held_out)


EXAMPLES = examples_of_unequal_counts()
WEIGHTED = with_weights(EXAMPLES)
BATCHES = ExampleBatches(EXAMPLES, batch=BATCH, seed=3)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory, ranks: RankProcesses) -> RankPool:
    return RankPool(
        tmp_path_factory.mktemp("examples"), 2, (2,), examples=EXAMPLES, processes=ranks
    )


@pytest.fixture(scope="module")
def plain(pool: RankPool) -> PlainRun:
    """A loop in plain PyTorch, which divides the sum of all targets' losses by their number."""
    return train_on(pool, BATCHES)


def train_on(pool: RankPool, examples: ExampleBatches) -> PlainRun:
    """Trains plainly on examples."""

    def tensors(arrays: tuple[np.ndarray, np.ndarray]) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(arrays[0]), torch.from_numpy(arrays[1])

    held_out = next(examples.held_out_batches(6, 6))
    batches = SimpleNamespace(
        batch=BATCH, places=0, samples=lambda step: tensors(examples.samples(step)),
        held_out_samples=lambda _: (*tensors(held_out), 1),
        documents=lambda _: None, held_out_documents=lambda _: None,
    )  # fmt: skip
    stack = build_layer_stack("gpt-tiny", pool.dials, device="cpu", seed=SETTINGS.seed)
    layers = list(zip(stack.names, stack.layers, strict=True))
    return train_plainly(layers, batches, SETTINGS, micro=BATCH, dtype=torch.float64)


def plain_held_out(plain: PlainRun) -> float:
    """The held-out loss after the last step of a plain run."""
    return plain.evaluations[max(plain.evaluations)].loss


def run(pool: RankPool, precision: Precision = "float64", **plan: Any) -> InstrumentedRun:  # noqa: ANN401  keywords of a plan
    return pool.run(tiny_plan(pool.graph, MACHINE, sequence=SEQUENCE, precision=precision, **plan))


@pytest.fixture(scope="module")
def at_once(pool: RankPool) -> InstrumentedRun:
    """All eight samples in one micro-batch on one device."""
    return run(pool, micro=BATCH)


def test_some_micro_batches_and_ranks_have_no_target_at_all():
    counts = np.stack([BATCHES.target_counts(step) for step in (1, 2, 3)])
    assert (counts.reshape(3, 4, 2).sum(axis=2) == 0).any()
    assert len(set(counts.sum(axis=1).tolist())) == 3


def test_the_loss_of_a_batch_is_that_of_a_plain_loop(plain: PlainRun, at_once: InstrumentedRun):
    steps = at_once.steps
    assert [step.loss for step in steps] == pytest.approx(plain.losses, rel=PLAIN_TOLERANCE)
    norms = [step.gradient_norm for step in steps]
    assert norms == pytest.approx(plain.gradient_norms, rel=PLAIN_TOLERANCE)
    assert steps[-1].held_out_loss == pytest.approx(plain_held_out(plain), rel=PLAIN_TOLERANCE)


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(plan, id=name, marks=() if name in QUICK else pytest.mark.slow)
        for name, plan in PLANS.items()
    ],
)
def test_a_plan_computes_the_mean_over_all_targets_of_the_global_batch(
    pool: RankPool, at_once: InstrumentedRun, plan: dict[str, Any]
):
    for step, expected in zip(run(pool, **plan).steps, at_once.steps, strict=True):
        assert step.loss == pytest.approx(expected.loss, rel=TOLERANCE)
        assert step.gradient_norm == pytest.approx(expected.gradient_norm, rel=TOLERANCE)
        assert step.held_out_loss == pytest.approx(expected.held_out_loss, rel=TOLERANCE)


def test_phases_change_no_bit_of_a_loss_over_unequal_numbers_of_targets(pool: RankPool):
    in_memory = run(pool, "float32", micro=2, accumulation=4).steps
    streamed = run(
        pool, "float32", micro=2, accumulation=4, phases=PHASES, offload=OFFLOADED[0]
    ).steps
    for step, expected in zip(streamed, in_memory, strict=True):
        assert (step.loss, step.gradient_norm) == (expected.loss, expected.gradient_norm)


@pytest.fixture(scope="module")
def weighted(tmp_path_factory: pytest.TempPathFactory, ranks: RankProcesses) -> RankPool:
    folder = tmp_path_factory.mktemp("weighted")
    return RankPool(folder, 2, (2,), examples=WEIGHTED, processes=ranks)


@pytest.fixture(scope="module")
def weighted_at_once(weighted: RankPool) -> InstrumentedRun:
    return run(weighted, micro=BATCH)


def test_targets_that_count_by_fractions_have_the_weighted_mean_of_a_plain_loop(
    weighted: RankPool, weighted_at_once: InstrumentedRun
):
    batches = ExampleBatches(WEIGHTED, batch=BATCH, seed=3)
    plain, steps = train_on(weighted, batches), weighted_at_once.steps
    assert [step.loss for step in steps] == pytest.approx(plain.losses, rel=PLAIN_TOLERANCE)
    norms = [step.gradient_norm for step in steps]
    assert norms == pytest.approx(plain.gradient_norms, rel=PLAIN_TOLERANCE)
    assert steps[-1].held_out_loss == pytest.approx(plain_held_out(plain), rel=PLAIN_TOLERANCE)


@pytest.mark.parametrize(
    "name", ["sharded", *(pytest.param(n, marks=pytest.mark.slow) for n in PLANS if n != "sharded")]
)
def test_fractions_are_summed_over_the_global_batch_under_any_plan(
    weighted: RankPool, weighted_at_once: InstrumentedRun, name: str
):
    steps = run(weighted, **PLANS[name]).steps
    for step, expected in zip(steps, weighted_at_once.steps, strict=True):
        assert step.loss == pytest.approx(expected.loss, rel=TOLERANCE)
        assert step.gradient_norm == pytest.approx(expected.gradient_norm, rel=TOLERANCE)
        assert step.held_out_loss == pytest.approx(expected.held_out_loss, rel=TOLERANCE)
