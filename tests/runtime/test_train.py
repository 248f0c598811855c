"""A run of a plan against plain PyTorch."""

import math

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from windlass.runtime.checkpoint import latest
from windlass.runtime.optimizer import learning_rate
from windlass.runtime.train import train

SAME = 1e-6
"""Relative: sums in float32 taken in another order."""


def plain(chain, batches, settings, micro):
    """Losses, norms and weights of a plain PyTorch loop over the whole model."""
    model = nn.ModuleDict(dict(zip(chain.names, chain.layers, strict=True)))
    for tied, owner in chain.ties.items():
        module, _, leaf = tied.rpartition(".")
        setattr(model.get_submodule(module), leaf, model.get_parameter(owner))
    parameters = list(model.parameters())
    decays = {True: settings.weight_decay, False: 0.0}
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if (p.dim() >= 2) == wide], "weight_decay": decay}
            for wide, decay in decays.items()
        ],
        betas=settings.betas,
        eps=settings.epsilon,
    )
    losses, norms = [], []
    for step in range(1, settings.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, step)
        optimizer.zero_grad()
        parts = []
        for first in range(0, settings.batch, micro):
            x, y = map(torch.from_numpy, batches.at(step, first, micro))
            for layer in model.values():
                x = layer(x)
            loss = functional.cross_entropy(x.flatten(0, 1), y.flatten())
            (loss * micro / settings.batch).backward()
            parts.append(loss.item())
        losses.append(sum(parts) / len(parts))
        norms.append(float(nn.utils.clip_grad_norm_(parameters, settings.clip or math.inf)))
        optimizer.step()
    return losses, norms, dict(model.named_parameters())


def saved_weights(folder):
    """Full name -> weight, read from the newest checkpoint by the safetensors library."""
    weights = {}
    for path in sorted(latest(folder).path.glob("*.safetensors")):
        tensors = load_file(path)
        weights |= {k.removeprefix("weight/"): v for k, v in tensors.items() if "weight/" in k}
    return weights


@pytest.mark.parametrize(
    ("model", "dials", "micro", "recompute"),
    [
        ("gpt-tiny", {}, 4, "none"),
        ("gpt-tiny", {}, 2, "layer"),
        ("gpt-tiny", {}, 1, "none"),
        ("llama-tiny", {"key_heads": 2}, 2, "none"),
        ("llama-tiny", {"key_heads": 2}, 2, "layer"),
    ],
)
def test_a_run_equals_a_plain_loop_over_the_whole_model(
    model, dials, micro, recompute, gpt, plan, program, batches, settings, folder
):
    chain = gpt(model, **dials)
    asked, data = settings(), batches()
    cut = plan(chain, micro=micro, accumulation=4 // micro, recompute=recompute)
    steps = list(train(cut, chain, data, asked, program=program(cut), checkpoints=folder))
    losses, norms, weights = plain(chain, data, asked, micro)
    assert [step.loss for step in steps] == pytest.approx(losses, rel=SAME)
    assert [step.gradient_norm for step in steps] == pytest.approx(norms, rel=SAME)
    ours = saved_weights(folder)
    assert ours.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(ours[name], weight.detach(), rtol=SAME, atol=SAME, msg=name)
