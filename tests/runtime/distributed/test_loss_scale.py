"""A float16 run multiplies its losses, skips steps that overflow, and loses no weight by it."""

import math
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from factories import tiny_plan
from rank_pool import BATCH, LAYERS, MACHINE, OFFLOADED, SEQUENCE, SETTINGS, RankPool, RankProcesses
from windlass.runtime.checkpoint.checkpoint import checkpoint_name, open_checkpoint
from windlass.runtime.step.step_state import LossScale
from windlass.runtime.verify.compare_runs import InstrumentedRun, compare_to_single_device
from windlass.schema.run_record import CHECKPOINT_FOLDER
from windlass.schema.train_request import TrainSettings

FIRST = 2.0**16
"""The scale of the first step, as of `torch.amp.GradScaler`."""

PHASES = tuple((first, first + LAYERS // 3) for first in range(0, LAYERS, LAYERS // 3))

PLANS: dict[str, dict[str, Any]] = {
    "in memory": {"micro": 4, "accumulation": 2},
    "pipeline": {"micro": 4, "accumulation": 2, "pipeline": 2},
    "sharded": {"micro": 4, "data": 2, "sharding": (2, 2)},
    "phases": {"micro": 4, "accumulation": 2, "phases": PHASES, "offload": OFFLOADED[0]},
    "sharded phases": {
        "micro": 4, "data": 2, "sharding": (2, 2), "phases": PHASES, "offload": OFFLOADED[1],
    },
}  # fmt: skip

QUICK = ("pipeline", "sharded phases")


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory, ranks: RankProcesses) -> RankPool:
    return RankPool(tmp_path_factory.mktemp("float16"), 2, (2,), processes=ranks)


def run(
    pool: RankPool,
    fault: str | None = None,
    settings: TrainSettings = SETTINGS,
    **plan: Any,  # noqa: ANN401  keywords of a plan
) -> InstrumentedRun:
    whole = tiny_plan(pool.graph, MACHINE, sequence=SEQUENCE, precision="float16", **plan)
    return pool.run(whole, fault, settings)


def weights_after(run: InstrumentedRun, pool: RankPool, step: int) -> dict[str, torch.Tensor]:
    """All tensors of the checkpoint after a step, with full layers."""
    folder = pool.merged_checkpoint(run, step)
    return {k: v for file in sorted(folder.glob("layer-*")) for k, v in load_file(file).items()}


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(plan, id=name, marks=() if name in QUICK else pytest.mark.slow)
        for name, plan in PLANS.items()
    ],
)
def test_an_overflow_on_one_rank_is_skipped_once_by_all_and_halves_the_scale(
    pool: RankPool, plan: dict[str, Any]
):
    skipping = run(pool, "overflow", **plan)
    assert [step.loss_scale for step in skipping.steps] == [FIRST, FIRST / 2, FIRST / 2]
    assert [math.isnan(step.gradient_norm) for step in skipping.steps] == [False, True, False]
    before, after = (weights_after(skipping, pool, step) for step in (1, 2))
    assert all(torch.equal(before[name], after[name]) for name in before)
    moved = weights_after(skipping, pool, 3)
    assert any(not torch.equal(moved[name], after[name]) for name in moved)
    saved = open_checkpoint(skipping.folder / CHECKPOINT_FOLDER / checkpoint_name(2)).manifest
    assert saved.loss_scale == LossScale(scale=FIRST / 2, clean_steps=0)


def test_a_resumed_run_goes_on_with_the_scale_that_its_checkpoint_has(pool: RankPool):
    plan = tiny_plan(pool.graph, MACHINE, sequence=SEQUENCE, precision="float16", micro=BATCH)
    whole = pool.run(plan, "overflow")
    checkpoint = whole.folder / CHECKPOINT_FOLDER / checkpoint_name(2)
    (resumed,) = pool.run(plan, resume=checkpoint).steps
    assert (resumed.loss, resumed.loss_scale) == (whole.steps[2].loss, FIRST / 2)
    assert resumed.gradient_norm == whole.steps[2].gradient_norm


def test_a_fixed_scale_that_overflows_stops_the_run_and_names_the_key(pool: RankPool):
    fixed = SETTINGS.model_copy(update={"loss_scale": 512.0})
    with pytest.raises(AssertionError, match=r"`train\.loss_scale` = 512; lower it"):
        run(pool, "overflow", fixed, micro=BATCH)


def test_a_split_step_in_float16_is_the_step_on_one_device(pool: RankPool):
    plan = tiny_plan(
        pool.graph, MACHINE, sequence=SEQUENCE, precision="float16", micro=2, accumulation=2,
        data=2, sharding=(2, 2),
    )  # fmt: skip
    result, _ = pool.verify(plan)
    assert result.passed, result


@pytest.mark.parametrize("degrees", [{"sharding": (2, 2)}, {"sharding": (1, 2)}, {}], ids=str)
def test_an_overflow_in_one_shard_leaves_what_it_leaves_on_one_device(
    pool: RankPool, degrees: dict[str, Any]
):
    settings = SETTINGS.model_copy(update={"steps": 5, "keep": 5, "epsilon": 1e-2})
    split, alone = (
        run(pool, "overflow", settings, micro=2, accumulation=4 // data, data=data, **words)
        for data, words in ((2, degrees), (1, {}))
    )
    result = compare_to_single_device(split, alone, pool.stack, settings, precision="float16")
    assert result.passed, result.first_mismatch
    assert [step.loss_scale for step in split.steps] == [FIRST, *[FIRST / 2] * 2, *[FIRST / 4] * 2]


def test_an_adaptive_scale_doubles_after_two_thousand_clean_steps():
    scale = LossScale.of(None)
    for _ in range(2000):
        assert scale.scale == FIRST
        scale = scale.after_step(overflowed=False)
    assert scale == LossScale(scale=2 * FIRST)
