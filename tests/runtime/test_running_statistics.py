"""Models with batch normalization, whose running statistics change in every forward pass."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from windlass.data.batches import Batches
from windlass.models.build import build_layer_stack
from windlass.models.layer_stack import LayerStack
from windlass.program.instruction import Program
from windlass.runtime.checkpoint.checkpoint import latest_checkpoint
from windlass.runtime.optimizers.learning_rate import learning_rate
from windlass.runtime.rank_context import RankContext
from windlass.runtime.train import train_loop
from windlass.schema.plan import Plan
from windlass.schema.run_record import Step
from windlass.schema.train_request import TrainSettings

MODEL = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm = nn.BatchNorm1d(2 * width)

    def forward(self, x):
        y = self.up(x)
        return x + self.down(torch.relu(self.norm(y.flatten(0, 1)).view_as(y)))


def build(vocabulary=257, width=16):
    return nn.Sequential(
        nn.Embedding(vocabulary, width), Block(width), Block(width), nn.Linear(width, vocabulary)
    )
"""


@pytest.fixture
def stack(tmp_path: Path) -> Callable[[], LayerStack]:
    """A model with two batch norms, the same each time."""
    (tmp_path / "model.py").write_text(MODEL)
    return lambda: build_layer_stack(f"{tmp_path / 'model.py'}:build", {}, device="cpu", seed=3)


@pytest.fixture
def run(
    stack: Callable[[], LayerStack],
    plan: Callable[..., Plan],
    program: Callable[[Plan], Program],
    batches: Callable[..., Batches],
    settings: Callable[..., TrainSettings],
):
    """Trains the model; the last step is evaluated and saved."""

    def make(folder: Path, micro: int = 4, **options: object) -> list[Step]:
        layers = stack()
        context = RankContext(
            plan=plan(layers, micro=micro, accumulation=4 // micro, **options),
            stack=layers,
            program=program(plan(layers, micro=micro, accumulation=4 // micro, **options)),
            settings=settings(save_every=1),
            checkpoints=folder,
        )
        return list(train_loop(context, batches(), resume=latest_checkpoint(folder)))

    return make


def saved_statistics(folder: Path) -> dict[str, Tensor]:
    """Full name -> running mean or variance, in the newest checkpoint."""
    files = sorted(latest_checkpoint(folder).path.glob("*.safetensors"))
    tensors = {name: tensor for path in files for name, tensor in load_file(path).items()}
    return {k.removeprefix("buffer/"): v for k, v in tensors.items() if "running_" in k}


def plain_loop(
    stack: LayerStack, batches: Batches, settings: TrainSettings, micro: int, precision: str
) -> tuple[list[float], nn.ModuleDict]:
    """Losses and the model of a plain loop with float32 masters; batch norms are in float32."""
    model = nn.ModuleDict(dict(zip(stack.names, stack.layers, strict=True)))
    decays = {True: settings.weight_decay, False: 0.0}
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if (p.dim() >= 2) == wide], "weight_decay": d}
            for wide, d in decays.items()
        ],
        betas=settings.betas,
        eps=settings.epsilon,
    )
    losses = []
    for step in range(1, settings.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, step)
        optimizer.zero_grad()
        parts = []
        for first in range(0, settings.batch, micro):
            x, y = map(torch.from_numpy, batches.samples(step, first, micro))
            for layer in model.values():
                low = (
                    {}
                    if precision == "float32"
                    else {
                        name: p.bfloat16().float() if "norm" in name else p.bfloat16()
                        for name, p in layer.named_parameters()
                    }
                )
                x = functional_call(layer, low, (x,))
            loss = functional.cross_entropy(x.flatten(0, 1).float(), y.flatten())
            (loss * micro / settings.batch).backward()
            parts.append(loss.item())
        losses.append(sum(parts) / len(parts))
        nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
    return losses, model


@pytest.mark.parametrize(
    ("precision", "micro", "recompute", "tolerance"),
    [("float32", 4, "none", 1e-6), ("float32", 2, "full", 1e-6), ("bfloat16", 2, "full", 1e-2)],
)
def test_losses_and_running_statistics_equal_those_of_a_plain_loop(
    precision: str, micro: int, recompute: str, tolerance: float,
    run: Callable[..., list[Step]], stack: Callable[[], LayerStack],
    batches: Callable[..., Batches], settings: Callable[..., TrainSettings], folder: Path,
):  # fmt: skip
    steps = run(folder, micro, precision=precision, recompute=recompute)

    losses, model = plain_loop(stack(), batches(), settings(), micro, precision)

    assert [step.loss for step in steps] == pytest.approx(losses, rel=tolerance)
    saved = saved_statistics(folder)
    expected = {name: b for name, b in model.named_buffers() if "running_" in name}
    assert saved.keys() == expected.keys()
    for name, statistic in expected.items():
        assert saved[name].dtype == torch.float32
        torch.testing.assert_close(saved[name], statistic, rtol=tolerance, atol=tolerance)
    if precision == "float32":
        model.eval()
        x, y = map(torch.from_numpy, next(iter(batches().held_out_batches(6, 6))))
        for layer in model.values():
            x = layer(x)
        held_out = functional.cross_entropy(x.flatten(0, 1), y.flatten()).item()
        assert steps[-1].held_out_loss == pytest.approx(held_out, rel=1e-5)


def test_a_resumed_run_has_the_running_statistics_of_an_uninterrupted_one(
    run: Callable[..., list[Step]], tmp_path: Path
):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    steps = run(whole, recompute="full")
    run(stopped, recompute="full")
    latest_checkpoint(stopped).path.rename(tmp_path / "lost")

    resumed = run(stopped, recompute="full")

    assert [step.loss for step in resumed] == [steps[-1].loss]
    for name, statistic in saved_statistics(whole).items():
        assert torch.equal(saved_statistics(stopped)[name], statistic)
