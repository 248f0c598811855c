"""Runs that train a part of the weights: in memory, sharded, resumed, and from a parent."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import windlass
from command_line import TINY
from windlass.errors import WindlassError
from windlass.models.layer_stack import materialize_layer
from windlass.schema import CHECKPOINT_FOLDER

MODEL, *OVERRIDES = TINY
LORA = ("lora.rank=2", "train.steps=4", "train.save_every=2", "train.learning_rate=0.01")


def train(home: Path, *overrides: str) -> windlass.Run:
    words = (*OVERRIDES, f"data.source={home / 'text'}", *LORA, *overrides)
    return windlass.train(MODEL, *words, root=home / "runs")


def tensors(run: windlass.Run) -> dict[str, torch.Tensor]:
    newest = max((run.folder / CHECKPOINT_FOLDER).iterdir())
    return {key: t for file in newest.glob("layer-*") for key, t in load_file(file).items()}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_frozen_weight_keeps_its_bits_and_has_no_state(home: Path, precision: str) -> None:
    run = train(home, f"precision={precision}")
    list(run)

    saved = tensors(run)
    stack = run.planned.objects.stack(run.planned.request.model_identity, seed=0)
    trained = {key.removeprefix("moment1/") for key in saved if key.startswith("moment1/")}
    for index, name in enumerate(stack.names):
        layer = materialize_layer(stack, index, seed=run.planned.request.train.seed, device="cpu")
        for path, weight in layer.named_parameters():
            full_name = f"{name}.{path}"
            assert (full_name in trained) == weight.requires_grad
            if full_name in stack.tied_weights or weight.requires_grad:
                continue
            value = saved[f"weight/{full_name}"]
            assert value.dtype == getattr(torch, precision)
            assert torch.equal(value, weight.detach().to(value.dtype))
    assert len(trained) == 8
    assert all(saved[f"weight/{name}"].dtype == torch.float32 for name in trained)
    assert any(saved[f"weight/{name}"].any() for name in trained if name.endswith("lora_b"))


def test_a_run_with_adapters_that_is_abandoned_resumes_to_the_same_numbers(home: Path) -> None:
    whole, left = train(home), train(home)
    list(whole)
    steps = iter(left)
    for step in steps:
        if step.step == 3:
            break
    del steps
    list(windlass.resume(left.folder, root=home / "runs"))

    assert [s.loss for s in windlass.load(left.folder).steps] == [
        s.loss for s in windlass.load(whole.folder).steps
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("home")
def test_a_plan_with_adapters_has_no_gradient_or_state_of_the_base() -> None:
    pins = ("precision=bfloat16", "compile=false", "recompute=none", "batch.micro=2")
    sizes = ("model.layers=6", "model.width=256", "model.heads=4")
    full, lora = (windlass.plan(MODEL, *OVERRIDES, *sizes, *pins, *words) for words in ((), LORA))

    count = lora.graph.parameter_count - lora.graph.trained_count
    assert count == full.graph.parameter_count
    spared = full.prediction.peaks[0].peak_bytes - lora.prediction.peaks[0].peak_bytes
    # Master, two moments and the gradient that is summed take 4 bytes each. The adapters' own state
    # and activations take a little of that.
    assert 15.9 * count < spared < 16.2 * count


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("phases=2",), "keeps such models in device memory"),
        (("offload.optimizer=disk",), "keeps such models in device memory"),
        (('train.frozen=["embedding.*"]',), "`train.frozen` with `lora`"),
        (("sparsity.level=0.5",), "`lora` with `sparsity`"),
        (('lora.targets=["q_proj"]',), "no linear layer"),
    ],
)
def test_what_adapters_cannot_do_yet_is_refused_in_a_sentence(
    home: Path, words: tuple[str, ...], message: str
) -> None:
    with pytest.raises(WindlassError, match=message):
        train(home, *words)
