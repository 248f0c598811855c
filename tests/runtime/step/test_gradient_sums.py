"""Gradients of several micro-batches are added, each to its own weight."""

import torch

from windlass.runtime.compute import add_gradients
from windlass.runtime.parameters import ModelParameter


def test_weights_to_which_autograd_gives_one_memory_have_sums_of_their_own():
    values = [torch.randn(1, 3, requires_grad=True) for _ in "ab"]
    weights = [
        ModelParameter(name=name, working=value.detach(), shape=value.shape)
        for name, value in zip("ab", values, strict=True)
    ]
    for micro in (1.0, 2.0):
        # As a class token and positions that are added to one sample.
        output = torch.zeros(1, 3) + values[0] + values[1]
        gradients = list(torch.autograd.grad(output, values, torch.full((1, 3), micro)))
        assert gradients[0].data_ptr() == gradients[1].data_ptr()
        add_gradients(weights, gradients, accumulated=True)
    for weight in weights:
        assert torch.equal(weight.gradient, torch.full((1, 3), 3.0))
