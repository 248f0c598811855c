"""Layers in which a token sees the tokens after it."""

import pytest
import torch
from torch import Tensor, nn

from windlass.models.build import build_layer_stack
from windlass.models.layer_stack import (
    LayerStack,
    layer_stack_from_module,
    layer_that_looks_ahead,
)

WIDTH, VOCABULARY = 16, 40
SMALL = {"layers": 2, "width": WIDTH, "heads": 2, "vocabulary": VOCABULARY, "sequence": 8}


class Encoder(nn.TransformerEncoderLayer):
    def __init__(self) -> None:
        super().__init__(WIDTH, 2, 32, batch_first=True)


class CausalEncoder(Encoder):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return super().forward(x, src_mask=mask, is_causal=True)


class BranchThatBeginsAtZero(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * x.mean(1, keepdim=True)


class FixedLength(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(2, 512, WIDTH))


def stack(*blocks: nn.Module) -> LayerStack:
    chain = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *blocks, nn.Linear(WIDTH, VOCABULARY))
    return layer_stack_from_module(chain, "mine", vocabulary=VOCABULARY)


def test_an_encoder_without_a_mask_is_named():
    assert layer_that_looks_ahead(stack(CausalEncoder(), Encoder())) == "`2`, a `Encoder`"


def test_an_encoder_with_a_causal_mask_is_not():
    assert layer_that_looks_ahead(stack(CausalEncoder(), CausalEncoder())) is None


def test_a_branch_whose_weights_begin_at_zero_is_seen():
    layer = layer_that_looks_ahead(stack(BranchThatBeginsAtZero()))
    assert layer == "`1`, a `BranchThatBeginsAtZero`"


def test_a_layer_that_cannot_be_tried_alone_is_let_pass():
    assert layer_that_looks_ahead(stack(FixedLength(WIDTH, WIDTH))) is None


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny"])
def test_no_token_of_a_causal_catalogue_model_sees_a_later_one(name: str):
    assert layer_that_looks_ahead(build_layer_stack(name, SMALL, device="cpu")) is None


def test_tokens_of_an_encoder_of_the_catalogue_see_later_ones():
    layer = layer_that_looks_ahead(build_layer_stack("bert-tiny", SMALL, device="cpu"))
    assert layer is not None
