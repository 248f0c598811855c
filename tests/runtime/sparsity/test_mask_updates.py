"""Masks that change during a run: counts, fresh blocks, and steps at which nothing changes."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from windlass.data.batches import Batches
from windlass.models.layer_stack import LayerStack
from windlass.program.instruction import Program
from windlass.runtime.checkpoint.checkpoint import checkpoint_folders
from windlass.runtime.rank_context import RankContext
from windlass.runtime.sparsity.mask_updates import sparse_modules
from windlass.runtime.train import train_loop
from windlass.schema.plan import Plan
from windlass.schema.sparsity import ModelIdentity, SparsityRequest
from windlass.schema.train_request import TrainSettings

STEPS, EVERY, BLOCK, WIDTH, SEED = 7, 2, 16, 128, 3
FORMATS = [
    {"schedule": "set"},
    {"schedule": "rigl"},
    {"schedule": "rigl", "precision": "bfloat16"},
    {"schedule": "rigl", "moments": "int8", "recompute": "full"},
]


@pytest.fixture
def trained(
    gpt: Callable[..., LayerStack],
    plan: Callable[..., Plan],
    program: Callable[[Plan], Program],
    batches: Callable[..., Batches],
    settings: Callable[..., TrainSettings],
    tmp_path: Path,
) -> Callable[..., tuple[LayerStack, list[dict[str, Tensor]]]]:
    """`trained(schedule="rigl")`: the stack, and all tensors after each step of a run."""

    def make(schedule: str, **formats: str) -> tuple[LayerStack, list[dict[str, Tensor]]]:
        sparsity = SparsityRequest(
            schedule=schedule, level=0.75, block=BLOCK, every=EVERY, until=1, drop=0.5
        )
        stack = gpt(layers=1, width=WIDTH, sparsity=sparsity, seed=SEED)
        identity = ModelIdentity(name="gpt-tiny", sparsity=sparsity)
        run_plan = plan(stack, micro=2, accumulation=2, model=identity, **formats)
        context = RankContext(
            plan=run_plan,
            stack=gpt(layers=1, width=WIDTH, sparsity=sparsity, device="meta"),
            program=program(run_plan),
            settings=settings(
                steps=STEPS, save_every=1, keep=STEPS, evaluate_sequences=0, seed=SEED
            ),
            checkpoints=tmp_path,
        )
        list(train_loop(context, batches()))
        return stack, [dict(tensors_of(path)) for path in checkpoint_folders(tmp_path)]

    return make


def tensors_of(checkpoint: Path) -> Iterator[tuple[str, Tensor]]:
    for file in sorted(checkpoint.glob("*.safetensors")):
        yield from load_file(file).items()


@pytest.mark.parametrize("formats", FORMATS, ids=str)
def test_masks_change_when_due_at_equal_counts_and_new_blocks_start_at_zero(
    formats: dict[str, str],
    trained: Callable[..., tuple[LayerStack, list[dict[str, Tensor]]]],
) -> None:
    stack, states = trained(**formats)

    assert len(states) == STEPS
    replaced = 0
    for path, module in sparse_modules(stack.layers[1]):
        name = f"{stack.names[1]}.{path}"
        masks = [state[f"buffer/{name}.blocks"] for state in states]
        span = module.in_features // BLOCK // module.groups
        cells = module.blocks // torch.tensor([1, span])
        assert torch.equal(masks[0], module.blocks)  # no change is due after step 1
        for step, (before, after) in enumerate(pairwise(masks), start=2):
            # In its place in the list each block stays in its row and column group, so that all
            # counts are equal at every step.
            assert torch.equal(after // torch.tensor([1, span]), cells)
            assert len(set(map(tuple, after.tolist()))) == len(after)
            changed = (before != after).any(1)
            is_due = step % EVERY == 0 and step < STEPS
            assert is_due or not changed.any()
            for kind in ("weight", "moment1", "moment2"):
                tensor = states[step - 1][f"{kind}/{name}.values"]
                assert not tensor[changed].any()
                assert tensor[~changed].any()
            replaced += int(changed.sum())
    assert replaced > 10


def test_sparse_modules_are_found_by_path(gpt: Callable[..., LayerStack]) -> None:
    stack = gpt(width=64, sparsity=SparsityRequest(level=0.5, block=BLOCK))
    paths = [path for path, _ in sparse_modules(stack.layers[1])]
    assert paths == ["attention.input", "attention.output", "hidden.input", "hidden.output"]
    assert list(sparse_modules(stack.layers[0])) == []
