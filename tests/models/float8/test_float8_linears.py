"""Linear layers in float8 beside torchao's, and what their numbers depend on."""

import copy
import dataclasses

import pytest
import torch
from torch import Tensor, nn

from windlass.models.fine_tuning.lora import LoraLinear
from windlass.models.float8.linears import takes_float8, use_float8
from windlass.runtime.verify.plain_loop.float8 import use_plain_float8

TINY = 1e-6
"""A factor so small that its scale is large, and one that is zero stands beside it."""


def layer_and_tokens(dtype: torch.dtype) -> tuple[nn.Linear, Tensor, Tensor]:
    """A layer, tokens of very different sizes, and a gradient of its output."""
    draws = torch.Generator().manual_seed(0)
    layer = nn.Linear(64, 32).to(dtype)
    sizes = torch.tensor([8.0, 1.0, TINY, 0.0]).view(4, 1, 1)
    x = torch.randn(4, 5, 64, generator=draws) * sizes
    return layer, x.to(dtype), (torch.randn(4, 5, 32, generator=draws) * 1e-3).to(dtype)


def passes(layer: nn.Module, x: Tensor, gradient: Tensor) -> list[Tensor]:
    """Output, gradient of the input and gradients of weight and bias."""
    inputs = x.clone().requires_grad_()
    layer.zero_grad()
    output = layer(inputs)
    output.backward(gradient)
    return [output.detach(), inputs.grad, *(p.grad.clone() for p in layer.parameters())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_bit_is_that_of_torchao(dtype: torch.dtype):
    float8 = pytest.importorskip("torchao.float8")
    layer, x, gradient = layer_and_tokens(dtype)
    recipe = float8.Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp")
    config = dataclasses.replace(recipe, emulate=True)
    twin = nn.Sequential(nn.Linear(64, 32).to(dtype))
    twin[0].load_state_dict(layer.state_dict())
    theirs = passes(float8.convert_to_float8_training(twin, config=config), x, gradient)
    use_float8(layer)
    for ours, expected in zip(passes(layer, x, gradient), theirs, strict=True):
        assert torch.equal(ours, expected)


def test_factors_that_are_rounded_without_a_float8_type_give_the_same_numbers():
    layer, x, gradient = layer_and_tokens(torch.float64)
    plain = nn.Linear(64, 32).double()
    plain.load_state_dict(layer.state_dict())
    use_plain_float8([plain])
    use_float8(layer)
    pairs = zip(passes(layer, x, gradient), passes(plain, x, gradient), strict=True)
    for ours, expected in pairs:
        torch.testing.assert_close(ours, expected, rtol=1e-13, atol=0)


def test_an_adapter_stays_as_it_is_beside_a_product_in_float8():
    layer, x, gradient = layer_and_tokens(torch.float64)
    adapted = LoraLinear(layer, rank=3, scale=0.5)
    torch.manual_seed(0)
    for factor in (adapted.lora_a, adapted.lora_b):
        nn.init.normal_(factor)
    plain, exact = copy.deepcopy(adapted), copy.deepcopy(adapted)
    use_plain_float8([plain])
    use_float8(adapted)
    results = [passes(each, x, gradient) for each in (adapted, plain, exact)]
    for ours, expected in zip(*results[:2], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=0)
    factors = [name.startswith("lora_") for name, _ in adapted.named_parameters()]
    for is_factor, ours, expected in zip(factors, results[0][2:], results[2][2:], strict=True):
        assert not is_factor or torch.equal(ours, expected)
    assert not torch.equal(results[0][0], results[2][0])


def test_a_token_has_the_same_numbers_whatever_stands_beside_it():
    layer, x, gradient = layer_and_tokens(torch.float32)
    exact = passes(layer, x, gradient)[0]
    use_float8(layer)
    output, of_input, of_weight, _ = passes(layer, x, gradient)
    parts = [passes(layer, *part) for part in zip(x.split(1), gradient.split(1), strict=True)]
    assert torch.equal(output, torch.cat([part[0] for part in parts]))
    assert torch.equal(of_input, torch.cat([part[1] for part in parts]))
    torch.testing.assert_close(of_weight, sum(part[2] for part in parts))
    error = (output - exact).abs().max() / exact.abs().max()
    assert 1e-3 < error < 2**-4  # three bits of mantissa


def test_layers_whose_sides_are_no_multiples_of_16_stay_as_they_are():
    assert takes_float8(nn.Linear(32, 48))
    assert not takes_float8(nn.Linear(32, 40))
    assert not takes_float8(nn.Embedding(32, 48))
