"""Every optimizer under every kind of plan takes the steps that it takes on a single device."""

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file

from factories import tiny_plan
from rank_pool import BATCH, LAYERS, MACHINE, OFFLOADED, SEQUENCE, SETTINGS, RankPool, RankProcesses
from windlass.runtime.verify.compare_runs import InstrumentedRun, compare_to_single_device
from windlass.schema import OtherOptimizer, TrainSettings, optimizer_law
from windlass.schema.plan import Offload

OTHERS: tuple[str, ...] = (*get_args(OtherOptimizer), "ema")
QUICK = ("muon", "adafactor", "ema")
"""Those that look at a whole matrix, at rows and columns of it, and those that keep averages."""

SHARDED = {"micro": 1, "accumulation": 4, "data": 2, "sharding": (2, 2)}
PLANS: dict[str, dict[str, Any]] = {
    "data": {"micro": 2, "accumulation": 2, "data": 2},
    "state-sharded": {"micro": 2, "accumulation": 2, "data": 2, "sharding": (1, 2)},
    "pipeline": {"micro": 1, "accumulation": 8, "pipeline": 2},
    "tensor": {"micro": 2, "accumulation": 4, "tensor": 2},
}
LOSS_DIGITS = 1e-12
"""Relative tolerance of losses in float64: 1e-16 for each of a few thousand sums."""
PHASES = ((0, 2), (2, 4), (4, LAYERS))


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory, ranks: RankProcesses) -> RankPool:
    return RankPool(tmp_path_factory.mktemp("optimizers"), 2, (2,), processes=ranks)


def settings_of(name: str) -> TrainSettings:
    """Those of the pool's runs, with the optimizer's own defaults; `ema` is AdamW with averages."""
    if name == "ema":
        return SETTINGS.model_copy(update={"ema": 0.5})
    kept = SETTINGS.model_dump(
        exclude={"betas", "momentum", "nesterov", "weight_decay", "schedule", "relative_step"}
    )
    return TrainSettings.model_validate(kept | {"optimizer": name})


def run(
    pool: RankPool,
    name: str,
    *,
    resume: Path | None = None,
    **plan: Any,  # noqa: ANN401  keywords of a plan
) -> InstrumentedRun:
    keywords = {"precision": "float64", "sequence": SEQUENCE} | plan
    choice = {"ema": 0.5} if name == "ema" else {"optimizer": name}
    given = tiny_plan(pool.graph, MACHINE, **keywords).model_copy(update=choice)
    return pool.run(given, settings=settings_of(name), resume=resume)


def require_equal(pool: RankPool, name: str, **plan: Any) -> None:  # noqa: ANN401  keywords of a plan
    precision = plan.get("precision", "float64")
    alone = run(pool, name, micro=1, accumulation=BATCH, precision=precision)
    result = compare_to_single_device(
        run(pool, name, **plan), alone, pool.stack, settings_of(name), precision=precision
    )
    assert result.passed, result.first_mismatch


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in OTHERS],
)
def test_a_sharded_optimizer_equals_one_on_a_single_device(pool: RankPool, name: str):
    require_equal(pool, name, **SHARDED)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("plan", PLANS)
def test_an_optimizer_under_any_plan_equals_one_on_a_single_device(
    pool: RankPool, name: str, plan: str
):
    require_equal(pool, name, **PLANS[plan])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [n for n in OTHERS if n == "ema" or optimizer_law(n).scope != "matrix"]
)
def test_an_optimizer_in_phases_equals_one_in_memory(pool: RankPool, name: str):
    require_equal(
        pool, name, micro=4, accumulation=2, precision="float32", recompute="full",
        offload=OFFLOADED[0], stages=(PHASES,),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ["schedule-free", "ema"])
@pytest.mark.parametrize("weights", ["on the device", "offloaded"])
def test_averages_of_sharded_offloaded_weights_equal_those_of_one_device(
    pool: RankPool, name: str, weights: str
):
    away = weights == "offloaded"
    require_equal(
        pool, name, micro=2, accumulation=2, data=2, precision="float32", recompute="full",
        sharding=(2, 2) if away else (1, 2),
        offload=OFFLOADED[0] if away else Offload(optimizer="disk"),
        stages=(PHASES,) if away else None,
    )  # fmt: skip


@pytest.mark.slow
def test_bfloat16_weights_round_alike_however_they_are_sharded(pool: RankPool):
    shardings = [{}, {"sharding": (1, 2)}, {"sharding": (2, 2)}]
    tensors = []
    for sharding in shardings:
        plan = tiny_plan(
            pool.graph, MACHINE, micro=2, accumulation=2, data=2, precision="bfloat16",
            sequence=SEQUENCE, **sharding,
        ).model_copy(update={"master_weights": False})  # fmt: skip
        merged = pool.merged_checkpoint(pool.run(plan, settings=SETTINGS), SETTINGS.steps)
        files = sorted(merged.glob("*.safetensors"))
        tensors.append({key: value for file in files for key, value in load_file(file).items()})
    for others in tensors[1:]:
        weights = [key for key in others if key.startswith("weight/")]
        assert weights
        assert all(others[key].dtype == torch.bfloat16 for key in weights)
        assert all(torch.equal(others[key], tensors[0][key]) for key in weights)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_a_run_of_an_optimizer_resumes_sharded_then_on_one_device(pool: RankPool, name: str):
    whole = run(pool, name, micro=1, accumulation=BATCH)
    sharded = run(pool, name, resume=pool.merged_checkpoint(whole, 1), **SHARDED)
    alone = run(pool, name, resume=pool.merged_checkpoint(sharded, 2), micro=1, accumulation=BATCH)
    for resumed, first in ((sharded, 1), (alone, 2)):
        losses = [step.loss for step in whole.steps[first:]]
        assert [step.loss for step in resumed.steps] == pytest.approx(losses, rel=LOSS_DIGITS)
