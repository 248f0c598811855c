"""Packed rows train as one batch does, however a plan divides them."""

from typing import Any

import numpy as np
import pytest

from factories import tiny_plan
from rank_pool import LAYERS, MACHINE, OFFLOADED, SEQUENCE, RankPool, RankProcesses
from windlass.data.examples import IGNORED_TARGET, ExampleDataset
from windlass.runtime.verify.compare_runs import InstrumentedRun
from windlass.schema.graph import Precision

TOLERANCE = 1e-12
"""Relative, in float64: three steps of a dozen layers round some thousand sums of 1e-16 each."""

PLANS: dict[str, dict[str, Any]] = {
    "recomputed": {"micro": 2, "accumulation": 4, "recompute": "full"},
    "data": {"micro": 2, "accumulation": 2, "data": 2, "sharding": (2, 2)},
    "pipeline": {"micro": 1, "accumulation": 8, "pipeline": 2},
    "tensor": {"micro": 2, "accumulation": 4, "tensor": 2},
    "context": {"micro": 2, "accumulation": 4, "context": 2},
}
QUICK = ("data", "tensor", "context")


def packed_examples() -> ExampleDataset:
    """Examples of one to four documents each, with targets in some of their tokens."""
    random = np.random.default_rng(11)
    inputs, targets = random.integers(0, 250, (2, 30, SEQUENCE))
    targets[random.random(targets.shape) < 0.5] = IGNORED_TARGET
    ends = np.sort(random.integers(1, SEQUENCE, (30, 3)), axis=1)
    documents = (np.arange(SEQUENCE) >= ends[..., None]).sum(axis=1)
    return ExampleDataset(inputs=inputs, targets=targets, held_out=6, documents=documents)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory, ranks: RankProcesses) -> RankPool:
    return RankPool(
        tmp_path_factory.mktemp("packed"), 2, (2,), examples=packed_examples(), processes=ranks
    )


def run(pool: RankPool, precision: Precision = "float64", **plan: Any) -> InstrumentedRun:  # noqa: ANN401  keywords of a plan
    return pool.run(tiny_plan(pool.graph, MACHINE, sequence=SEQUENCE, precision=precision, **plan))


@pytest.fixture(scope="module")
def at_once(pool: RankPool) -> InstrumentedRun:
    return run(pool, micro=8)


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(plan, id=name, marks=() if name in QUICK else pytest.mark.slow)
        for name, plan in PLANS.items()
    ],
)
def test_a_plan_moves_the_documents_of_packed_rows_with_their_tokens(
    pool: RankPool, at_once: InstrumentedRun, plan: dict[str, Any]
):
    for step, expected in zip(run(pool, **plan).steps, at_once.steps, strict=True):
        assert step.loss == pytest.approx(expected.loss, rel=TOLERANCE)
        assert step.gradient_norm == pytest.approx(expected.gradient_norm, rel=TOLERANCE)
        assert step.held_out_loss == pytest.approx(expected.held_out_loss, rel=TOLERANCE)


def test_phases_change_no_bit_of_packed_rows(pool: RankPool):
    phases = tuple((first, first + LAYERS // 3) for first in range(0, LAYERS, LAYERS // 3))
    in_memory = run(pool, "float32", micro=2, accumulation=4).steps
    streamed = run(
        pool, "float32", micro=2, accumulation=4, phases=phases, offload=OFFLOADED[0]
    ).steps
    for step, expected in zip(streamed, in_memory, strict=True):
        assert (step.loss, step.gradient_norm) == (expected.loss, expected.gradient_norm)
