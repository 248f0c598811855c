"""Runs of sparse models: resumed, exported, sampled, and started from the masks of another."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import windlass
from command_line import TINY
from windlass.errors import CheckpointError, ModelError, RequestError
from windlass.models import build_layer_stack
from windlass.runtime import InferenceModel, latest_checkpoint
from windlass.schema import CHECKPOINT_FOLDER
from windlass.sparsity import load_masks

MODEL, *OVERRIDES = TINY
SIZES = ("model.width=64", "model.heads=4")
SPARSE = ("sparsity.level=0.5", "sparsity.block=16")


def run_of(home: Path, *overrides: str) -> windlass.Run:
    words = (*OVERRIDES, *SIZES, f"data.source={home / 'text'}", "train.steps=4", *overrides)
    run = windlass.train(MODEL, *words, root=home / "runs")
    list(run)
    return run


def losses(run: windlass.Run) -> list[tuple[int, float, float]]:
    return [(s.step, s.loss, s.gradient_norm) for s in windlass.load(run.folder).steps]


def checkpoint_bytes(run: windlass.Run) -> int:
    newest = max((run.folder / CHECKPOINT_FOLDER).iterdir())
    return sum(file.stat().st_size for file in newest.glob("layer-0001.*"))


def test_a_sparse_run_abandoned_midway_resumes_to_the_same_numbers(home: Path) -> None:
    whole = run_of(home, *SPARSE, "train.save_every=2")
    words = (*OVERRIDES, *SIZES, *SPARSE, f"data.source={home / 'text'}", "train.steps=4")
    left = windlass.train(MODEL, *words, "train.save_every=2", root=home / "runs")
    steps = iter(left)
    for step in steps:
        if step.step == 3:
            break
    del steps
    resumed = windlass.resume(left.folder, root=home / "runs")
    list(resumed)
    assert resumed.done == 2
    assert losses(left) == losses(whole)
    assert resumed.planned.plan.model.sparsity == whole.planned.request.sparsity


@pytest.mark.parametrize("pattern", ["block", "unstructured"])
def test_an_exported_run_is_the_dense_model_that_computes_the_same(
    pattern: str, home: Path
) -> None:
    run = run_of(home, *SPARSE, f"sparsity.pattern={pattern}")
    weights, masks = home / "weights.safetensors", home / "masks.safetensors"

    exported = windlass.export(run.folder, to=weights, masks=masks)

    assert (exported.step, exported.sparse_layers) == (4, 4)
    dials = {"layers": 1, "width": 64, "heads": 4, "vocabulary": 257}
    dense = build_layer_stack(MODEL, dials, device="cpu")
    sparse = run.planned.objects.stack(run.planned.request.model_identity, seed=None)
    checkpoint = latest_checkpoint(run.folder / CHECKPOINT_FOLDER)
    assert checkpoint is not None
    tensors = load_file(weights)
    kept = load_masks(masks)
    for name, layer in zip(dense.names, dense.layers, strict=True):
        for path, parameter in layer.named_parameters():
            full_name = f"{name}.{path}"
            if full_name not in dense.tied_weights:
                tensor = tensors.pop(full_name)
                parameter.data.copy_(tensor)
                if full_name.removesuffix(".weight") in kept:
                    assert float((tensor != 0).float().mean()) == pytest.approx(0.5, abs=0.001)
    assert not tensors
    x = tokens = torch.arange(16).reshape(2, 8)
    for layer in dense.layers:
        x = layer.eval()(x)
    torch.testing.assert_close(x, InferenceModel(sparse, checkpoint).logits(tokens))


def test_a_run_starts_from_the_masks_of_another(home: Path) -> None:
    first = run_of(home, *SPARSE, "train.seed=5")
    masks, again = home / "masks.safetensors", home / "again.safetensors"
    windlass.export(first.folder, masks=masks)

    second = run_of(home, f"sparsity.mask={masks}", "sparsity.block=16")
    windlass.export(second.folder, masks=again)

    one, two = load_masks(masks), load_masks(again)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name].kept, two[name].kept) for name in one)
    with pytest.raises(ModelError, match="it is of another model"):
        run_of(home, f"sparsity.mask={masks}", "sparsity.block=16", "model.width=128")


def test_a_checkpoint_falls_with_density(home: Path) -> None:
    dense, sparse = run_of(home), run_of(home, *SPARSE)
    weights = 4 * 64 * 64 + 2 * 64 * 256
    saved = (checkpoint_bytes(dense) - checkpoint_bytes(sparse)) / (3 * 4 * weights)
    # Float32 weight and two moments; half of the weights are absent, less 8 bytes for each block.
    assert 1 - 1.1 * 0.5 < saved <= 0.5
    assert "".join(windlass.sample(sparse.folder, "3 times ", tokens=5))


def test_what_cannot_be_exported_is_refused(home: Path) -> None:
    run = run_of(home, "train.steps=1")
    with pytest.raises(RequestError, match="name what to write"):
        windlass.export(run.folder)
    with pytest.raises(CheckpointError, match="has no sparse layer; leave `--masks` out"):
        windlass.export(run.folder, masks=home / "masks.safetensors")
