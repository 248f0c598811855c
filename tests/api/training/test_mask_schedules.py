"""Masks that change between steps, under plans for several ranks.

`pytest -m slow tests/api/training/test_mask_schedules.py` takes about two minutes on two cores.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import windlass
from command_line import TINY
from windlass.errors import PlanError
from windlass.runtime.checkpoint.checkpoint import latest_checkpoint
from windlass.runtime.checkpoint.merge_shards import merge_shards
from windlass.schema.plan import Offload
from windlass.training.legs import refuse_offloaded_masks

MODEL, *DIALS = TINY
CLOSE = 1e-5
"""Relative tolerance of losses: float32 sums over ranks, in another order."""


def trained(home: Path, schedule: str, *parallel: str) -> windlass.Run:
    """Six steps with a micro-batch of one sequence, and masks that change after every second."""
    words = (
        *DIALS, f"data.source={home / 'text'}", "model.width=128", "model.heads=4", "batch.micro=1",
        "sparsity.level=0.5", "sparsity.block=16", f"sparsity.schedule={schedule}",
        "sparsity.every=2", "sparsity.until=1", "train.steps=6",
    )  # fmt: skip
    run = windlass.train(MODEL, *words, *parallel, root=home / "runs")
    list(run)
    return run


def masks(run: windlass.Run) -> dict[str, Tensor]:
    checkpoint = latest_checkpoint(run.folder / "checkpoints")
    assert checkpoint is not None
    stack = run.planned.objects.stack(run.planned.request.model_identity, seed=None)
    whole = merge_shards(checkpoint, stack, run.folder / "whole")
    tensors = {}
    for file in whole.path.glob("*.safetensors"):
        tensors |= {k: v for k, v in load_file(file).items() if k.startswith("buffer/")}
    return tensors


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["set", "rigl"])
@pytest.mark.parametrize(
    "parallel",
    [
        ["parallel.data=2"],
        ["parallel.data=2", "sharding.optimizer=2"],
        ["parallel.data=2", "sharding.parameters=2", "sharding.optimizer=2"],
        ["parallel.tensor=2"],
        ["parallel.pipeline=2", "parallel.schedule=zero-bubble"],
        ["parallel.tensor=2", "parallel.data=2"],
    ],
    ids=str,
)
def test_ranks_change_masks_as_one_device_does(
    home: Path, schedule: str, parallel: list[str]
) -> None:
    single, several = trained(home, schedule), trained(home, schedule, *parallel)
    losses = [[s.loss for s in windlass.load(run.folder).steps] for run in (single, several)]
    assert losses[1] == pytest.approx(losses[0], rel=CLOSE)
    expected, actual = masks(single), masks(several)
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


def test_masks_that_change_need_their_optimizer_state_in_device_memory(home: Path) -> None:
    planned = windlass.plan(
        MODEL, *DIALS, f"data.source={home / 'text'}", "model.width=128", "sparsity.level=0.5",
        "sparsity.block=16", "sparsity.schedule=rigl",
    )  # fmt: skip
    refuse_offloaded_masks(planned)
    plan = planned.plan.model_copy(update={"offload": Offload(optimizer="disk")})
    with pytest.raises(PlanError, match=r"must be in device memory .* `phases` = 1"):
        refuse_offloaded_masks(replace(planned, result=replace(planned.result, plan=plan)))
