"""Parameter groups: learning rates and weight decays of their own."""

import pytest
import torch
from torch import nn

import windlass
from windlass.errors import InputErrors
from windlass.runtime.optimizer_state.optimizer_state import StateFormat
from windlass.runtime.optimizers.learning_rate import learning_rate
from windlass.runtime.optimizers.optimizer import Optimizer
from windlass.runtime.parameters import new_master_parameter
from windlass.runtime.verify.plain_loop.optimizers import plain_optimizer
from windlass.schema import ParameterGroup, TrainSettings, optimizer_law
from windlass.torch_ext import device_for

CPU = device_for("cpu")
NAMES = {"head.weight": (4, 6), "block0.weight": (6, 5), "block0.bias": (6,), "block1.bias": (6,)}
GROUPS = (
    ParameterGroup(pattern="head.*", rate_factor=0.25, weight_decay=0.0),
    ParameterGroup(pattern="*.bias", rate_factor=2.0, weight_decay=0.3),
    ParameterGroup(pattern="block1.*", rate_factor=9.0),
)


@pytest.mark.parametrize("optimizer", ["adamw", "lion", "lamb", "adafactor"])
def test_weights_of_a_group_have_its_learning_rate_and_decay(optimizer: str):
    settings = TrainSettings(
        steps=5, batch=4, sequence=16, optimizer=optimizer, learning_rate=0.05, groups=GROUPS
    )
    draws = torch.Generator().manual_seed(0)
    state = StateFormat(optimizer_law(settings.optimizer))
    masters = {name: torch.randn(shape, generator=draws) for name, shape in NAMES.items()}
    plain = {name: nn.Parameter(master.clone()) for name, master in masters.items()}
    weights = [
        new_master_parameter(
            name,
            master,
            master,
            state,
            decays=master.dim() > 1,
            matrix=master.dim() > 1,
            factors=state.new_factors(tuple(master.shape), master),
        )
        for name, master in masters.items()
    ]
    ours = Optimizer(settings, CPU)
    theirs = plain_optimizer(
        plain.values(), settings, names={id(each): name for name, each in plain.items()}
    )
    for step in range(1, 6):
        for weight in weights:
            weight.gradient = torch.randn(weight.shape, generator=draws)
            plain[weight.name].grad = weight.gradient.clone()
        ours.update(weights, step, None)
        for group in theirs.param_groups:
            group["lr"] = learning_rate(settings, step) * group["factor"]
        theirs.step()
    for weight in weights:
        torch.testing.assert_close(weight.master, plain[weight.name].data, rtol=1e-6, atol=1e-6)


def test_a_group_that_matches_no_weight_is_refused():
    groups = 'train.groups=[{pattern="blok*"}, {pattern="head.*"}, {pattern="nothing"}]'
    with pytest.raises(InputErrors) as caught:
        windlass.plan("gpt-tiny", groups)
    assert [message.split("`")[3] for message in caught.value.messages] == ["blok*", "nothing"]
