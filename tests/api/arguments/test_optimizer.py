"""Optimizers that a caller passes, and the settings that they stand for."""

from functools import partial

import pytest
import torch
from torch import nn

from windlass.errors import RequestError
from windlass.jobs.arguments.optimizer import optimizer_overrides
from windlass.schema import Request, TrainRequest

LAYER = nn.Linear(2, 2)


def read(optimizer: object) -> TrainRequest:
    return Request.resolve(None, optimizer_overrides(optimizer)).train


def test_a_name_a_class_a_function_and_an_object_are_read_as_settings():
    assert read("lion").optimizer == "lion"
    by_class = read(torch.optim.AdamW)
    assert (by_class.optimizer, by_class.learning_rate) == ("adamw", None)
    assert (by_class.betas, by_class.weight_decay) == ((0.9, 0.999), 0.01)
    made = torch.optim.AdamW(LAYER.parameters(), lr=3e-4, betas=(0.8, 0.9), eps=1e-6, foreach=True)
    adamw = read(made)
    assert (adamw.learning_rate, adamw.betas, adamw.epsilon) == (3e-4, (0.8, 0.9), 1e-6)
    sgd = read(partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True))
    assert (sgd.optimizer, sgd.learning_rate, sgd.momentum) == ("sgd", 0.1, 0.9)
    assert sgd.nesterov is True
    assert read(lambda weights: torch.optim.SGD(weights, lr=0.2)).learning_rate == 0.2


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (torch.optim.RMSprop, r"a `torch.optim.rmsprop.RMSprop`; it takes a name \(`adamw`, "),
        (3, "a `builtins.int`; it takes a name"),
        (nn.Linear, "is called with a list of weights and fails: TypeError"),
        (partial(torch.optim.AdamW, amsgrad=True), "`amsgrad=True`, which Windlass does not"),
        (
            torch.optim.AdamW([{"params": LAYER.weight, "lr": 0.1}, {"params": LAYER.bias}]),
            "2 groups of weights whose settings differ; write them as `train.groups`",
        ),
    ],
)
def test_an_optimizer_that_windlass_does_not_compute_is_one_sentence(optimizer: object, words: str):
    with pytest.raises(RequestError, match=words) as caught:
        optimizer_overrides(optimizer)
    assert "\n" not in str(caught.value)
