"""Models that run by the code of transformers, trained beside a plain loop over the same model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import windlass
from tiny_transformers import ARCHITECTURES, tiny_folder, tiny_input

pytestmark = pytest.mark.slow
STEPS, RATE, TOLERANCE = 20, 3e-3, 1e-5
IN_FLOAT64, TOLERANCE_OF_FLOAT64 = ("nemotron",), 1e-9
"""Its squared ReLU lets float32's rounding grow to 2.3e-5 in 20 steps, and float64's to 5e-14."""
SETTINGS = (
    f"train.steps={STEPS}", "train.batch=4", "compile=false",
    "train.evaluate_sequences=1", "data.held_out=0.2", "train.clip=inf", "train.optimizer=adamw",
    f"train.learning_rate={RATE}", "train.schedule=constant", "train.warmup=0",
    "train.weight_decay=0", "train.betas=[0.9,0.95]", "train.epsilon=1e-8",
)  # fmt: skip
TENSOR = ("smollm3", "granite", "cohere2", "exaone4", "starcoder2", "nemotron")
"""Those whose own plan is taken."""


def examples(model: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401  of transformers
    """Five inputs and their targets, of which four are trained on."""
    x = tiny_input(model, 5)
    return (x, torch.arange(5)) if x.is_floating_point() else (x[:, :30], x[:, 1:31])


def plain_losses(model: Any, inputs: Tensor, targets: Tensor) -> list[float]:  # noqa: ANN401
    optimizer = torch.optim.AdamW(
        model.train().parameters(), lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0
    )
    losses = []
    for _ in range(STEPS):
        logits = model(**{model.main_input_name: inputs}).logits
        loss = functional.cross_entropy(logits.flatten(0, -2), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture
def losses(home: Path) -> Any:  # noqa: ANN401  a function
    """Trains a folder on all of its examples at once, so that their order does not matter."""

    def train(model_type: str, *overrides: str) -> tuple[list[float], list[float]]:
        name, model = tiny_folder(model_type, home / "model")
        inputs, targets = examples(model)
        data = list(zip(inputs, targets, strict=True))
        precision = "float64" if model_type in IN_FLOAT64 else "float32"
        settings = (*SETTINGS, f"precision={precision}", *overrides)
        run = windlass.train(name, *settings, data=data, root=home / "runs")
        model = model.to(getattr(torch, precision))
        return [step.loss for step in run], plain_losses(model, inputs[:4], targets[:4])

    return train


def tolerance(model_type: str) -> float:
    return TOLERANCE_OF_FLOAT64 if model_type in IN_FLOAT64 else TOLERANCE


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_twenty_steps_are_those_of_a_plain_loop(losses: Any, model_type: str):  # noqa: ANN401
    ours, plain = losses(model_type)

    assert ours == pytest.approx(plain, rel=tolerance(model_type))


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_twenty_steps_in_phases_have_the_bits_of_those_in_memory(losses: Any, model_type: str):  # noqa: ANN401
    ours, _ = losses(model_type, "phases=1", "precision=float32")
    in_phases, _ = losses(model_type, "phases=2", "precision=float32")

    assert in_phases == ours


@pytest.mark.parametrize("model_type", ["olmo2", "deepseek_v3", "roberta", "dinov2"])
def test_two_stages_learn_as_a_plain_loop_does(losses: Any, model_type: str):  # noqa: ANN401
    ours, plain = losses(model_type, "parallel.pipeline=2", "batch.micro=2")

    assert ours == pytest.approx(plain, rel=tolerance(model_type))


@pytest.mark.parametrize("model_type", TENSOR)
def test_two_tensor_ranks_learn_as_a_plain_loop_does(losses: Any, model_type: str):  # noqa: ANN401
    ours, plain = losses(model_type, "parallel.tensor=2")

    assert ours == pytest.approx(plain, rel=tolerance(model_type))
