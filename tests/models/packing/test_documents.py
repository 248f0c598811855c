"""Packed rows compute what their documents compute alone."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from windlass.models.attention import Attention
from windlass.models.build import build_layer_stack
from windlass.models.catalog import model_config
from windlass.models.layer_stack import materialize_layer
from windlass.models.loss import IGNORE_INDEX
from windlass.models.positions.documents import (
    document_buffers,
    document_lengths,
    positions_in_documents,
)
from windlass.runtime.layer_templates import layer_templates

DOCUMENTS = torch.tensor([[0] * 5 + [1] * 1 + [2] * 9 + [3], [4] * 8 + [0] * 8])
LENGTHS = [[5, 1, 9, 1], [8, 8]]
DIALS = {"layers": 2, "width": 32, "heads": 4, "vocabulary": 40, "sequence": 16, "dropout": 0.0}

TOLERANCE = 1e-12
"""Relative, in float64: two blocks round some hundred sums of 1e-16 each."""


def test_positions_begin_at_zero_in_each_document():
    expected = [[place for length in row for place in range(length)] for row in LENGTHS]
    assert positions_in_documents(DOCUMENTS).tolist() == expected
    assert [document_lengths(row) for row in DOCUMENTS] == LENGTHS


@pytest.mark.parametrize("layout", [{}, {"sliding_window": 4}, {"attention_softcap": 5.0}])
def test_a_mask_and_documents_one_by_one_give_the_same_attention(
    layout: dict[str, float], monkeypatch: pytest.MonkeyPatch
):
    config = replace(model_config("llama-tiny"), width=32, heads=4, kv_heads=2, **layout)
    attention = Attention(config).double()
    x = torch.randn(2, 16, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    attention.documents = DOCUMENTS
    alone = attention(x)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert torch.allclose(attention(x), alone, rtol=TOLERANCE, atol=TOLERANCE)


def losses(layers: list[nn.Module], tokens: Tensor, targets: Tensor) -> Tensor:
    """Sum of the losses of all targets, by the plain modules."""
    x = tokens
    for layer in layers:
        x = layer(x)
    return functional.cross_entropy(
        x.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )


# Torch's own, while it compiles.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", ["gpt-tiny", "llama-tiny", "gpt2-124m", "bert-tiny"])
def test_loss_and_gradients_of_packed_rows_are_those_of_the_documents_alone(
    model: str, compiled: bool
):
    stack = build_layer_stack(model, DIALS, device="meta", seed=0)
    layers = [
        materialize_layer(stack, index, seed=3, device="cpu").double()
        for index in range(len(stack.layers))
    ]
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 40, (2, 16), generator=generator)
    targets = torch.randint(0, 40, (2, 16), generator=generator)
    targets[torch.rand(2, 16, generator=generator) < 0.4] = IGNORE_INDEX
    weights = [dict(layer.named_parameters()) for layer in layers]
    flat = [weight for named in weights for weight in named.values()]

    x, templates = tokens, layer_templates(stack, compiled=compiled)
    for index, template in enumerate(templates):
        last = targets if index == len(templates) - 1 else None
        named = [weights[index][name] for name in template.parameters]
        x = template(named, (), None, x, last, DOCUMENTS, seed=0)
    packed = torch.autograd.grad(x, flat)

    # Compiled code rounds the float32 angles of positions in its own way.
    plain = [torch.compile(layer) for layer in layers] if compiled else layers
    pieces = [
        losses(plain, tokens[row : row + 1, first:end], targets[row : row + 1, first:end])
        for row, (first, end) in [
            (row, (sum(lengths[:i]), sum(lengths[: i + 1])))
            for row, lengths in enumerate(LENGTHS)
            for i in range(len(lengths))
        ]
    ]
    total = torch.stack(pieces).sum() / (targets != IGNORE_INDEX).sum()
    assert float(x.detach()) == pytest.approx(float(total.detach()), rel=TOLERANCE)
    alone = torch.autograd.grad(total, flat)
    for ours, theirs in zip((each.to_dense() for each in packed), alone, strict=True):
        assert torch.allclose(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)


def test_layers_that_look_at_other_tokens_take_documents():
    stack = build_layer_stack("llama-tiny", DIALS, device="meta", seed=0)
    found = [document_buffers(layer) for layer in stack.layers]
    assert found == [("documents",), ("attention.documents",), ("attention.documents",), ()]
