"""Which layers can compute their loss fused, and what they compute then."""

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from windlass.models.build import build_layer_stack
from windlass.models.fused_loss.projection import can_fuse_loss, fuse_loss, padded_linear
from windlass.models.init_weights import meta_copy
from windlass.models.loss import mean_cross_entropy, set_layer_loss

WIDTH, VOCABULARY = 8, 20


class CappedHead(nn.Module):
    """Logits within 30, as in Gemma 2."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return 30 * torch.tanh(self.linear(x) / 30)


class TwoHeads(nn.Module):
    """Whose last linear layer is not the last to run."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Linear(WIDTH, VOCABULARY)
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.inner(x))


@pytest.mark.parametrize(
    ("layer", "can"),
    [
        (nn.Linear(WIDTH, VOCABULARY), True),
        (nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)), True),
        (CappedHead(), False),
        (TwoHeads(), False),
        (nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, VOCABULARY)), False),
        (nn.LayerNorm(WIDTH), False),
    ],
)
def test_a_layer_fuses_its_loss_if_it_returns_what_its_last_linear_gives(
    layer: nn.Module, can: bool
):
    assert can_fuse_loss(layer, WIDTH) is can


def test_a_layer_with_a_loss_of_its_own_is_not_fused():
    layer = nn.Linear(WIDTH, VOCABULARY)
    set_layer_loss(layer, lambda logits, _: logits.sum())
    assert not can_fuse_loss(layer, WIDTH)


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "bert-tiny", "gpt-j-6b"])
def test_the_head_of_every_family_gives_its_loss_for_targets_and_logits_without(name: str):
    dials = {"layers": 1, "width": WIDTH, "heads": 2, "vocabulary": VOCABULARY, "sequence": 16}
    head = build_layer_stack(name, dials, device="cpu", seed=0).layers[-1]
    assert can_fuse_loss(head, WIDTH)
    fused = meta_copy(head)
    targets_name = fuse_loss(fused)
    x, targets = torch.randn(2, 5, WIDTH), torch.randint(0, VOCABULARY, (2, 5))
    weights = dict(head.named_parameters())

    loss = functional_call(fused, {**weights, targets_name: targets}, (x,))

    assert torch.allclose(loss, mean_cross_entropy(head(x), targets), rtol=1e-6)
    assert torch.equal(functional_call(fused, weights, (x,)), head(x))
    assert list(dict(fused.named_parameters())) == list(weights)
    assert fused.state_dict().keys() == head.state_dict().keys()


ROUNDING = 1e-12
"""Float64: products of other sides may be summed in another order."""


@pytest.mark.parametrize("biased", [False, True])
def test_a_padded_projection_has_the_logits_and_gradients_of_the_plain_one(biased: bool):
    results = []
    for linear in (nn.functional.linear, padded_linear):
        torch.manual_seed(0)
        layer = nn.Linear(WIDTH, VOCABULARY, bias=biased, dtype=torch.float64)
        x = torch.randn(2, 3, WIDTH, dtype=torch.float64, requires_grad=True)
        logits = linear(x, layer.weight, layer.bias)
        logits.logsumexp(-1).sum().backward()
        results.append((logits, x.grad, *(weight.grad for weight in layer.parameters())))
    for plain, padded in zip(*results, strict=True):
        torch.testing.assert_close(padded, plain, rtol=ROUNDING, atol=ROUNDING)
