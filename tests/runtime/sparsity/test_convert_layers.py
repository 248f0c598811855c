"""Checkpoints whose layers become dense or sparser, for the next leg of a run."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from windlass.data.batches import Batches
from windlass.models.layer_stack import LayerStack
from windlass.program.instruction import Program
from windlass.runtime.checkpoint.checkpoint import Checkpoint, latest_checkpoint
from windlass.runtime.checkpoint.load_state import load_weights
from windlass.runtime.rank_context import RankContext
from windlass.runtime.sparsity.convert_layers import convert_checkpoint
from windlass.runtime.sparsity.mask_updates import sparse_modules
from windlass.runtime.train import train_loop
from windlass.schema.plan import Plan
from windlass.schema.sparsity import SparsityRequest
from windlass.schema.train_request import TrainSettings

BLOCK, WIDTH = 16, 64


@pytest.fixture
def stack(gpt: Callable[..., LayerStack]) -> Callable[..., LayerStack]:
    """`stack("gradual", 2)`: the model of a leg, on the meta device."""

    def make(schedule: str, leg: int, **fields: object) -> LayerStack:
        options = {"level": 0.5, "block": BLOCK} | fields
        sparsity = SparsityRequest(schedule=schedule, leg=leg, **options)
        return gpt(layers=1, width=WIDTH, device="meta", sparsity=sparsity)

    return make


@pytest.fixture
def trained(
    plan: Callable[..., Plan],
    program: Callable[[Plan], Program],
    batches: Callable[..., Batches],
    settings: Callable[..., TrainSettings],
    tmp_path: Path,
) -> Callable[..., Checkpoint]:
    """The checkpoint after two steps of a model."""

    def make(stack: LayerStack, **formats: str) -> Checkpoint:
        run_plan = plan(stack, **formats)
        context = RankContext(
            plan=run_plan, stack=stack, program=program(run_plan),
            settings=settings(steps=2, evaluate_sequences=0, seed=3),
            checkpoints=tmp_path / "checkpoints",
        )  # fmt: skip
        list(train_loop(context, batches()))
        checkpoint = latest_checkpoint(context.checkpoints)
        assert checkpoint is not None
        return checkpoint

    return make


def tensors_of(checkpoint: Checkpoint) -> dict[str, Tensor]:
    files = sorted(checkpoint.path.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("pattern", ["block", "unstructured"])
def test_a_dense_leg_starts_with_the_weights_that_the_sparse_layers_stand_for(
    pattern: str,
    stack: Callable[..., LayerStack],
    trained: Callable[..., Checkpoint],
    gpt: Callable[..., LayerStack],
    tmp_path: Path,
) -> None:
    sparse, dense = (stack("then-dense", leg, pattern=pattern) for leg in (0, 1))
    saved = trained(sparse)

    converted = convert_checkpoint(saved, sparse, dense, tmp_path / ".converted", graph="next")

    assert (converted.manifest.step, converted.manifest.graph) == (2, "next")
    # The second way: modules with these weights, asked for their dense ones.
    request = SparsityRequest(schedule="then-dense", level=0.5, block=BLOCK, pattern=pattern)
    real = gpt(layers=1, width=WIDTH, sparsity=request)
    load_weights(saved, real)
    before, after = tensors_of(saved), tensors_of(converted)
    for buffer, tensor in real.layers[1].named_buffers():
        tensor.copy_(before[f"buffer/block0.{buffer}"])
    for path in ("attention.input", "attention.output", "hidden.input", "hidden.output"):
        module = real.layers[1].get_submodule(path)
        expected = module.weight if pattern != "block" else module.dense_weight()
        assert torch.equal(after[f"weight/block0.{path}.weight"], expected)
        assert after[f"moment2/block0.{path}.weight"].count_nonzero() > 0
        assert after[f"steps/block0.{path}.weight"] == 2
    assert not any("blocks" in name or "mask" in name or "values" in name for name in after)
    same = before.keys() & after.keys()
    assert all(torch.equal(before[name], after[name]) for name in same if "hidden" not in name)


def test_each_pruning_keeps_the_largest_blocks_with_their_moments(
    stack: Callable[..., LayerStack], trained: Callable[..., Checkpoint], tmp_path: Path
) -> None:
    models = [stack("gradual", leg) for leg in range(5)]
    state = trained(models[0])
    kept = []

    for leg, (old, new) in enumerate(pairwise(models), start=1):
        before = tensors_of(state)
        state = convert_checkpoint(state, old, new, tmp_path / f".leg{leg}", graph=f"leg {leg}")
        after = tensors_of(state)
        for path, module in sparse_modules(new.layers[1]):
            name = f"block0.{path}"
            blocks, values = after[f"buffer/{name}.blocks"], after[f"weight/{name}.values"]
            assert len(blocks) == sum(part.rows * part.kept for part in module.parts)
            row, group = blocks.long().unbind(1)
            group = group // (module.in_features // BLOCK // module.groups)
            counts = torch.bincount(row * module.groups + group)
            assert counts.min() == counts.max() or len(module.parts) > 1
            assert after[f"steps/{name}.values"] == 2
            kept.append(len(blocks))
            dense = before.get(f"weight/{name}.weight")
            if dense is not None:  # of each row the largest blocks of each group
                grid = dense.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).transpose(1, 2)
                moments = before[f"moment1/{name}.weight"]
                moment = moments.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).transpose(1, 2)
                chosen = blocks.long().unbind(1)
                assert torch.equal(values, grid[chosen])
                assert torch.equal(after[f"moment1/{name}.values"], moment[chosen])
                lost = torch.ones(grid.shape[:2], dtype=torch.bool)
                lost[chosen] = False
                norms = grid.flatten(2).norm(dim=2).view(len(grid), module.groups, -1)
                lost = lost.view(norms.shape)
                least = norms.masked_fill(lost, torch.inf).amin(2)
                assert (norms.masked_fill(~lost, 0).amax(2) <= least).all()
            else:
                earlier = set(map(tuple, before[f"buffer/{name}.blocks"].tolist()))
                assert {tuple(pair) for pair in blocks.tolist()} <= earlier
    assert kept[-1] < kept[0]


def test_moments_below_float32_are_decoded_for_the_next_leg(
    stack: Callable[..., LayerStack], trained: Callable[..., Checkpoint], tmp_path: Path
) -> None:
    sparse, dense = (stack("then-dense", leg) for leg in (0, 1))
    saved = trained(sparse, moments="int8")

    after = tensors_of(convert_checkpoint(saved, sparse, dense, tmp_path / "dense", graph=""))

    moment = after["moment2/block0.hidden.input.weight"]
    assert moment.dtype == torch.float32
    assert "scale2/block0.hidden.input.weight" not in after
    blocks = tensors_of(saved)["buffer/block0.hidden.input.blocks"].long()
    grid = moment.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).transpose(1, 2)
    absent = torch.ones(grid.shape[:2], dtype=torch.bool)
    absent[blocks.unbind(1)] = False
    assert not grid[absent].any()
    assert grid[~absent].any()
    assert "scale2/block0.hidden_norm.weight" in after  # what is not converted stays as it was
