"""Attention by plain matrix products, beside its definition and torch's fused kernel."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from windlass.models.attention import Attention, attend, set_attention_backend
from windlass.models.catalog import model_config
from windlass.models.config import TransformerConfig
from windlass.models.positions.rope_scaling import RopeScaling
from windlass.schema import AttentionBackend

EXACT = 1e-12
"""float64 sums of a few hundred terms, in another order."""


def by_definition(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool,
    window: int | None = None,
    softcap: float = math.inf,
) -> Tensor:
    """Attention of one token after the other, to the tokens that it sees."""
    tokens, repeats = query.shape[-2], query.shape[1] // key.shape[1]
    outputs = torch.empty_like(query)
    for head in range(query.shape[1]):
        keys, values = key[:, head // repeats], value[:, head // repeats]
        for token in range(tokens):
            reach = tokens if window is None else window
            last = token + 1 if is_causal else min(token + reach, tokens)
            seen = slice(max(0, token - reach + 1), last)
            scores = torch.einsum("bk,bsk->bs", query[:, head, token], keys[:, seen])
            scores = scores / math.sqrt(query.shape[-1])
            if softcap < math.inf:
                scores = softcap * (scores / softcap).tanh()
            weights = scores.exp()
            weights = weights / weights.sum(dim=1, keepdim=True)
            outputs[:, head, token] = torch.einsum("bs,bsk->bk", weights, values[:, seen])
    return outputs


def factors(tokens: int, heads: int, kv_heads: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, count, tokens, 4) for count in (heads, kv_heads, kv_heads)]
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


# One tile; two of which the last is short; four of which the last is short.
@pytest.mark.parametrize("tokens", [7, 150, 515])
@pytest.mark.parametrize("kv_heads", [2, 1])
@pytest.mark.parametrize("is_causal", [True, False])
def test_plain_attention_is_the_mean_of_the_values_that_a_token_sees(
    tokens: int, kv_heads: int, is_causal: bool
):
    query, key, value = factors(tokens, 2, kv_heads)
    plain = attend(query, key, value, is_causal=is_causal, backend="math")
    expected = by_definition(query, key, value, is_causal=is_causal)
    torch.testing.assert_close(plain, expected, rtol=EXACT, atol=EXACT)


# One tile; three, of which each but the first skips keys on one side or both.
@pytest.mark.parametrize("tokens", [40, 300])
@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("backend", ["math", "flash"])
@pytest.mark.parametrize("is_causal", [True, False])
def test_a_token_sees_only_its_window_and_no_score_above_the_cap(
    is_causal: bool, backend: AttentionBackend, softcap: float | None, tokens: int
):
    config = TransformerConfig(
        name="x", layers=2, width=16, heads=4, kv_heads=2, ffn=8, vocabulary=4, sequence=tokens,
        causal=is_causal, sliding_window=6, attention_softcap=softcap,
    )  # fmt: skip
    layer = Attention(config).double()
    set_attention_backend(layer, backend)
    x = torch.randn(2, tokens, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    parts = (10 * layer.input(x)).split([16, 8, 8], dim=-1)
    query, key, value = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in parts)

    mixed = layer._attend(query, key, value)

    expected = by_definition(
        query, key, value, is_causal=is_causal, window=6, softcap=softcap or math.inf
    )
    torch.testing.assert_close(mixed, expected, rtol=EXACT, atol=EXACT)


def test_only_blocks_of_the_pattern_have_a_window_with_positions_of_its_own():
    config = replace(model_config("gemma3-1b"), rope_scaling=RopeScaling(type="linear", factor=8.0))

    blocks = [config.of_block(index) for index in range(12)]

    assert [block.sliding_window for block in blocks] == 2 * [*5 * [512], None]
    assert [block.rotary_base for block in blocks] == 2 * [*5 * [1e4], 1e6]
    assert [block.rope_scaling is None for block in blocks] == 2 * [*5 * [True], False]


@pytest.mark.parametrize("is_causal", [True, False])
def test_plain_and_fused_attention_have_the_same_gradients(is_causal: bool):
    gradients = []
    for backend in ("math", "flash"):
        inputs = [x.requires_grad_() for x in factors(300, 4, 2)]
        mixed = attend(*inputs, is_causal=is_causal, backend=backend)
        gradients.append(torch.autograd.grad(mixed.square().sum(), inputs))
    for plain, fused in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, fused, rtol=EXACT, atol=EXACT)


def test_all_attention_of_a_layer_takes_the_backend_that_is_set():
    config = TransformerConfig(
        name="x", layers=2, width=8, heads=2, kv_heads=1, ffn=8, vocabulary=4, sequence=9
    )
    layer = torch.nn.Sequential(Attention(config), torch.nn.Sequential(Attention(config)))
    set_attention_backend(layer, "math")
    assert [m.backend for m in layer.modules() if isinstance(m, Attention)] == ["math", "math"]
