"""Plain attention in every way that the runtime calls a layer."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from windlass.models.layer_stack import LayerStack
from windlass.runtime.layer_templates import LayerTemplate
from windlass.runtime.step.step_state import backward_input, backward_weight

SAME = 1e-10
"""float64 sums of some hundred terms, in another order; gradients of keys' biases are zero."""
MODELS = ("gpt-tiny", "llama-tiny", "bert-tiny", "modernbert-base")


def tensors(stack: LayerStack) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(1)
    # The second block, which has a window where only some do.
    weights = [p.detach().double().requires_grad_() for p in stack.layers[2].parameters()]
    x = torch.randn(2, 300, 32, generator=generator, dtype=torch.float64)
    return weights, x.requires_grad_()


def results(template: LayerTemplate, stack: LayerStack, *, selective: bool) -> list[Tensor]:
    weights, x = tensors(stack)
    y = template(weights, [], None, x, seed=0, selective=selective)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *weights])]


@pytest.mark.parametrize("model", MODELS)
def test_a_layer_gives_what_it_gives_with_fused_attention(
    model: str, gpt: Callable[..., LayerStack]
):
    stack = gpt(model, sequence=300)
    fused, plain = (
        results(
            LayerTemplate(stack.layers[2], last=False, compiled=False, attention=attention),
            stack, selective=False,
        )
        for attention in ("flash", "math")
    )  # fmt: skip
    for one, other in zip(plain, fused, strict=True):
        torch.testing.assert_close(one, other, rtol=SAME, atol=SAME)


@pytest.mark.parametrize("model", MODELS)
def test_selective_recompute_changes_no_bit(model: str, gpt: Callable[..., LayerStack]):
    stack = gpt(model, sequence=300)
    template = LayerTemplate(stack.layers[2], last=False, compiled=False, attention="math")
    kept, repeated = (results(template, stack, selective=each) for each in (False, True))
    assert all(map(torch.equal, kept, repeated))


def test_a_split_backward_pass_gives_the_same_gradients(gpt: Callable[..., LayerStack]):
    stack = gpt(sequence=300)
    template = LayerTemplate(stack.layers[2], last=False, compiled=False, attention="math")
    _, x_gradient, *gradients = results(template, stack, selective=False)
    weights, x = tensors(stack)
    y = template(weights, [], None, x, seed=0)
    input_gradient, deferred = backward_input(x, y, 2 * y.detach(), weights)
    split = backward_weight(weights, deferred)
    for one, other in zip([input_gradient, *split], [x_gradient, *gradients], strict=True):
        torch.testing.assert_close(one, other, rtol=SAME, atol=SAME)
