"""Tensor-parallel ranks, also those of a two-dimensional grid, train as a single device does."""

from pathlib import Path

import pytest

from factories import tiny_plan
from program_bytes import sent_bytes_by_kind
from rank_pool import (
    BATCH,
    LAYERS,
    LOSS_TOLERANCE,
    MACHINE,
    OFFLOADED,
    SEQUENCE,
    CheckedPlans,
    RankPool,
    slow,
)
from windlass.schema.answers.verification import TOLERANCE
from windlass.schema.graph import Precision
from windlass.schema.tensor_grid import TensorGrid

PRECISIONS = ("float64", slow("float32"))
"""What is the same to 1e-9 is the same to a rounding of float32; drawn plans have both."""


@pytest.mark.parametrize("precision", PRECISIONS)
def test_two_dimensional_tensor_parallelism_equals_a_single_device_and_sends_its_bytes(
    pool: RankPool, precision: str
) -> None:
    plan = tiny_plan(
        pool.graph, MACHINE, tensor=TensorGrid(2, 2), micro=4, accumulation=BATCH // 4,
        sequence=SEQUENCE, precision=precision,
    )  # fmt: skip
    CheckedPlans().check(pool, plan)


@pytest.mark.parametrize("tensor", [2, slow(TensorGrid(2, 2))])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_selective_recompute_with_tensor_parallelism_equals_a_single_device_and_gathers_again(
    pool: RankPool, tensor: int, precision: str
) -> None:
    plan = tiny_plan(
        pool.graph, MACHINE, tensor=tensor, micro=4, accumulation=BATCH // 4, sequence=SEQUENCE,
        precision=precision, recompute="selective",
    )  # fmt: skip
    CheckedPlans().check(pool, plan)
    without_recompute = tiny_plan(
        pool.graph, MACHINE, tensor=tensor, micro=4, accumulation=BATCH // 4, sequence=SEQUENCE,
        precision=precision,
    )  # fmt: skip
    twice, once = (
        sent_bytes_by_kind(each, pool.graph, 0)["backward"] for each in (plan, without_recompute)
    )
    assert once < twice < 2 * once


@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_encoder_with_two_dimensional_tensor_parallelism_equals_a_single_device(
    encoders: RankPool, precision: str
) -> None:
    plan = tiny_plan(
        encoders.graph, MACHINE, tensor=TensorGrid(2, 2), micro=4, accumulation=BATCH // 4,
        sequence=SEQUENCE, precision=precision,
    )  # fmt: skip
    CheckedPlans().check(encoders, plan)


@pytest.mark.slow
def test_two_dimensional_tensor_parallelism_runs_in_phases_from_a_disk(pool: RankPool) -> None:
    plan = tiny_plan(
        pool.graph, MACHINE, tensor=TensorGrid(2, 2), micro=4, accumulation=BATCH // 4,
        sequence=SEQUENCE, offload=OFFLOADED[0], stages=(((0, 2), (2, 4), (4, LAYERS)),),
        recompute="full",
    )  # fmt: skip
    CheckedPlans().check(pool, plan)


@pytest.mark.parametrize(
    ("before", "after", "precision"),
    [
        ({"tensor": TensorGrid(2, 2)}, {"tensor": TensorGrid(2, 2)}, "float64"),
        slow({"tensor": 2, "data": 2, "sharding": (1, 2)}, {"tensor": TensorGrid(2, 2)}, "float32"),
        slow({"tensor": TensorGrid(2, 2)}, {"tensor": 2, "pipeline": 2}, "float32"),
    ],
    ids=["2x2 to 2x2", "2 x r2 to 2x2", "2x2 to p2 x 2"],
)
def test_a_run_resumes_under_a_plan_with_or_without_a_grid(
    pool: RankPool, before: dict, after: dict, precision: Precision
) -> None:
    first, second = (
        tiny_plan(
            pool.graph, MACHINE, micro=4 // degrees.get("data", 1), accumulation=BATCH // 4,
            sequence=SEQUENCE, precision=precision, **degrees,
        )
        for degrees in (before, after)
    )  # fmt: skip
    resumed = pool.run(second, resume=pool.merged_checkpoint(pool.verify(first)[1], 1))
    reference, rel = pool.single_device_run(precision).steps[1:], TOLERANCE[precision]
    for step, expected in zip(resumed.steps, reference, strict=True):
        assert step.loss == pytest.approx(expected.loss, rel=rel)
        assert step.gradient_norm == pytest.approx(expected.gradient_norm, rel=rel)
    loss, expected_loss = resumed.steps[-1].held_out_loss, pool.last_step(precision).held_out_loss
    assert loss == pytest.approx(expected_loss, rel=LOSS_TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "degrees",
    [
        {"pipeline": 2, "tensor": TensorGrid(2, 2)},
        {"tensor": TensorGrid(2, 2), "data": 2, "sharding": (2, 2)},
        {"tensor": TensorGrid(2, 2), "data": 2, "sharding": (1, 2)},
        {"tensor": TensorGrid(4, 2)},
        {"tensor": TensorGrid(2, 4)},
        {"tensor": TensorGrid(1, 4)},
    ],
    ids=str,
)
def test_a_grid_works_with_pipeline_stages_and_sharding(wide_pool: RankPool, degrees: dict) -> None:
    plan = tiny_plan(
        wide_pool.graph, MACHINE, micro=1, accumulation=BATCH // degrees.get("data", 1),
        sequence=SEQUENCE, precision="float64", **degrees,
    )  # fmt: skip
    CheckedPlans().check(wide_pool, plan)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", [(1, 1), (2, 2)], ids=str)
def test_sixteen_ranks_parallel_in_every_dimension_equal_a_single_device(
    tmp_path: Path, sharding: tuple[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    sixteen, checked = RankPool(tmp_path, 16, (TensorGrid(2, 2),)), CheckedPlans()
    try:
        plan = tiny_plan(
            sixteen.graph, MACHINE, pipeline=2, tensor=TensorGrid(2, 2), data=2, micro=1,
            accumulation=BATCH // 2, sequence=SEQUENCE, sharding=sharding, precision="float64",
        )  # fmt: skip
        checked.check(sixteen, plan)
    finally:
        sixteen.close()
    with capsys.disabled():
        print(f"\n{checked}")
