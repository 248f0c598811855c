"""A mixture of experts is what a plain loop over tokens and experts computes."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from windlass.models.catalog import apply_model_arguments, model_config
from windlass.models.config import ExpertConfig, TransformerConfig
from windlass.models.context_parallel import ContextParallelRank
from windlass.models.experts.grouped_products import grouped_linear
from windlass.models.experts.mixture import MixtureOfExperts
from windlass.models.experts.routing_ops import drop_late_tokens

SAME_FLOAT64 = 1e-12
"""Sums in another order, in float64."""
BATCH, SEQUENCE, WIDTH = 3, 7, 8


def a_config(**experts: object) -> TransformerConfig:
    config = apply_model_arguments(
        model_config("llama-tiny"), {"width": WIDTH, "heads": 2, "kv_heads": 2, "layers": 1}
    )
    return replace(
        config, experts=ExpertConfig(**{"count": 5, "per_token": 2, "ffn": 6, **experts})
    )


def a_mixture(config: TransformerConfig) -> MixtureOfExperts:
    torch.manual_seed(1)
    assert config.experts is not None
    module = MixtureOfExperts(config, config.experts).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


def dense_loop(module: MixtureOfExperts, x: Tensor, config: ExpertConfig) -> tuple[Tensor, Tensor]:
    """The output, and the balance losses of all sequences, written down token by token."""
    experts, router = module.experts, module.router
    gate, up, down = experts.gate.weight, experts.up.weight, experts.down.weight
    outputs, losses = [], []
    for sequence in x:
        taken = [0] * config.count
        chosen_by, shares, rows = [0.0] * config.count, [], []
        for token in sequence:
            logits = router.weight @ token
            scores = logits.softmax(0) if config.scores == "softmax" else logits.sigmoid()
            bias = 0 if router.balance_bias is None else router.balance_bias
            best = sorted(range(config.count), key=lambda e: -float((scores + bias)[e].detach()))
            chosen = best[: config.per_token]
            total = sum(scores[e] for e in chosen) if config.norm_topk else 1
            row = torch.zeros_like(token)
            for e in chosen:
                taken[e] += 1
                chosen_by[e] += 1
                slots = config.slots(len(sequence))
                if slots is None or taken[e] <= slots:
                    inner = functional.silu(gate[e] @ token) * (up[e] @ token)
                    row = row + scores[e] / total * (down[e] @ inner)
            if module.shared is not None:
                shared = module.shared(token)
                if module.shared_gate is not None:
                    shared = shared * module.shared_gate(token).sigmoid()
                row = row + shared
            rows.append(row)
            shares.append(scores / scores.sum())
        mean = torch.stack(shares).mean(0)
        choices = len(sequence) * config.per_token
        losses.append(
            sum(config.count * chosen_by[e] / choices * mean[e] for e in range(config.count))
        )
        outputs.append(torch.stack(rows))
    return torch.stack(outputs), torch.stack(losses)


KINDS = {
    "softmax": {},
    "one expert a token": {"per_token": 1, "norm_topk": False},
    "not normalised": {"norm_topk": False},
    "sigmoid and bias": {"scores": "sigmoid", "balance_bias": 0.1},
    "balance loss": {"balance_loss": 0.3},
    "capacity": {"capacity": 0.8, "balance_loss": 0.1},
    "shared": {"shared_ffn": 4},
    "gated shared": {"shared_ffn": 4, "shared_gate": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_those_of_a_loop_over_tokens_and_experts(kind: str):
    config = a_config(**KINDS[kind])
    experts, module = config.experts, a_mixture(config)
    assert experts is not None
    if module.router.balance_bias is not None:
        module.router.balance_bias.copy_(torch.linspace(-1, 1, experts.count))
    x = torch.randn(BATCH, SEQUENCE, WIDTH, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(BATCH, SEQUENCE, WIDTH, dtype=torch.float64)
    leaves = [x, *module.parameters()]

    y = module(x)
    gradients = torch.autograd.grad((y * weight).sum(), leaves)

    expected, losses = dense_loop(module, x, experts)
    loss = (expected * weight).sum() + experts.balance_loss * losses.mean()
    by_hand = torch.autograd.grad(loss, leaves)
    torch.testing.assert_close(y, expected, rtol=SAME_FLOAT64, atol=SAME_FLOAT64)
    for one, other in zip(gradients, by_hand, strict=True):
        torch.testing.assert_close(one, other, rtol=SAME_FLOAT64, atol=SAME_FLOAT64)


def test_the_balance_loss_of_a_batch_is_the_sum_over_its_micro_batches():
    config = a_config(balance_loss=0.3)
    module = a_mixture(config)
    x = torch.randn(4, SEQUENCE, WIDTH, dtype=torch.float64)
    module.router.balance_scale = torch.tensor(1 / 4, dtype=torch.float64)

    def gradient_of(parts: tuple[Tensor, ...]) -> Tensor:
        sums = [torch.autograd.grad(module(x).sum() * 0, module.router.weight)[0] for x in parts]
        return torch.stack(sums).sum(0)

    whole = gradient_of((x,))
    torch.testing.assert_close(gradient_of(x.split(1)), whole, rtol=0, atol=SAME_FLOAT64)
    torch.testing.assert_close(gradient_of(x.split(3)), whole, rtol=0, atol=SAME_FLOAT64)
    assert whole.abs().max() > 0


def test_the_load_counts_each_choice_of_training_and_none_of_evaluation():
    module = a_mixture(a_config(capacity=0.5))
    x = torch.randn(BATCH, SEQUENCE, WIDTH, dtype=torch.float64)
    ranked = (x @ module.router.weight.T).topk(2).indices.flatten().tolist()

    module(x)
    module.eval()(x)

    assert module.router.load.tolist() == [ranked.count(expert) for expert in range(5)]


@pytest.mark.parametrize("capacity", [0.5, 1.0, 5.0])
def test_dropped_choices_are_those_behind_the_first_of_a_sequence_and_no_other(capacity: float):
    """Five experts have room for `ceil(capacity * s * k / E)` of each sequence's choices."""
    module = a_mixture(a_config(capacity=capacity))
    x = torch.randn(BATCH, SEQUENCE, WIDTH, dtype=torch.float64)
    room = math.ceil(capacity * SEQUENCE * 2 / 5)
    chosen = (x @ module.router.weight.T).topk(2).indices.flatten(1)
    late = sum(max(0, row.tolist().count(expert) - room) for row in chosen for expert in range(5))

    module(x)
    module.eval()(x)

    assert module.router.dropped.item() == late
    assert (late > 0) == (capacity < 5)


@pytest.mark.parametrize("degree", [2, 3])
def test_ranks_that_divide_a_sequence_drop_the_choices_that_one_drops(degree: int):
    """Each rank is told how often its experts were chosen in front of each of its runs."""
    tokens, count, slots = 12 * degree, 5, 7
    experts = torch.randint(count, (BATCH, tokens, 2))
    whole = drop_late_tokens(experts, None, count, slots)
    chosen = functional.one_hot(experts, count).sum(2)  # [b s E]
    for index in range(degree):
        rank = ContextParallelRank(degree=degree, index=index)
        own = torch.from_numpy(rank.own_tokens(np.arange(tokens)))
        firsts = rank.first_positions(tokens // degree)
        before = torch.stack([chosen[:, :first].sum(1) for first in firsts], dim=1)

        dropped = drop_late_tokens(experts[:, own], before, count, slots)

        assert torch.equal(dropped, whole[:, own])
    assert (whole == count).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_by_expert_have_the_bits_of_the_grouped_product_of_torch(dtype: torch.dtype):
    counts = torch.tensor([3, 0, 5, 1])
    x = torch.randn(9, 16, dtype=dtype, requires_grad=True)
    weight = torch.randn(4, 8, 16, dtype=dtype, requires_grad=True)
    gradient = torch.randn(9, 8, dtype=dtype)

    ours = grouped_linear(x, weight, counts)
    by_ours = torch.autograd.grad(ours, [x, weight], gradient)

    ends = counts.cumsum(0).to(torch.int32)
    theirs = functional.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    by_theirs = torch.autograd.grad(theirs, [x, weight], gradient)
    assert torch.equal(ours, theirs)
    assert all(map(torch.equal, by_ours, by_theirs))


def test_products_by_expert_keep_the_rules_of_an_operator():
    counts = torch.tensor([3, 0, 2])
    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 5, 4, dtype=torch.float64, requires_grad=True)

    torch.library.opcheck(torch.ops.windlass.grouped_linear, (x, weight, counts))


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        ({"per_token": 9}, "`experts_per_token` is 9, must be at least 1 and at most `experts` 5"),
        ({"capacity": -1.0}, "`capacity` is -1, must be above 0"),
        ({"dense_layers": 4}, "none of 1 layers has experts"),
        ({"shared_gate": True}, "there is no `shared_ffn` that it gates"),
    ],
)
def test_experts_that_cannot_be_are_refused_with_their_numbers(
    experts: dict[str, Any], message: str
):
    assert any(message in error for error in a_config(**experts).errors())
