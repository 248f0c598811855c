"""Ranks that divide sequences have all tokens once, and see what a whole sequence would show."""

from math import lcm

import numpy as np
import pytest
import torch

from windlass.models.build import build_layer_stack
from windlass.models.context_parallel import (
    ContextParallelRank,
    at_positions,
    count_in_runs,
)
from windlass.models.context_parallel_layers import (
    can_divide_sequences,
    divide_sequence,
)
from windlass.models.tensor_parallel.shard_params import EqualShard


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_each_token_is_of_one_rank_which_knows_its_position(degree: int):
    sequence = 2 * degree * 3
    tokens = np.arange(sequence)[None].repeat(2, axis=0)
    found = []
    for index in range(degree):
        rank = ContextParallelRank(degree=degree, index=index)
        own = rank.own_tokens(tokens)
        firsts = rank.first_positions(own.shape[1])
        assert positions(own.shape[1], firsts).tolist() == own[0].tolist() == own[1].tolist()
        table = torch.arange(sequence)[:, None]
        assert at_positions(table, own.shape[1], firsts)[:, 0].tolist() == own[0].tolist()
        found += own[0].tolist()
    assert sorted(found) == list(range(sequence))


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
@pytest.mark.parametrize("degree", [1, 2, 3])
def test_tensor_parallel_ranks_share_the_tokens_of_one_in_their_order(degree: int, parts: int):
    sequence = degree * lcm(2, parts) * 3
    for index in range(degree):
        rank = ContextParallelRank(degree=degree, index=index)
        own, shared = rank.own_tokens(np.arange(sequence)[None])[0], []
        for number in range(parts):
            firsts = rank.first_positions(len(own) // parts, EqualShard(number, parts))
            shared += positions(len(own) // parts, firsts).tolist()
        assert shared == own.tolist()


def positions(count: int, firsts: tuple[int, ...]) -> torch.Tensor:
    return count_in_runs(count, firsts, torch.device("cpu"), dtype=torch.int64)


@pytest.mark.parametrize("degree", [2, 3, 8])
def test_all_ranks_see_equally_many_tokens_under_a_causal_mask(degree: int):
    sequence = 2 * degree * 5
    ranks = [ContextParallelRank(degree=degree, index=index) for index in range(degree)]
    own = [rank.own_tokens(np.arange(sequence)[None])[0] for rank in ranks]
    assert len({int((each + 1).sum()) for each in own}) == 1


def test_only_layers_that_see_other_tokens_by_our_attention_can_be_divided():
    assert can_divide_sequences(build_layer_stack("llama-tiny", {}, device="meta").layers)
    assert can_divide_sequences(build_layer_stack("bert-tiny", {}, device="meta").layers)
    assert can_divide_sequences(build_layer_stack("moe-tiny", {}, device="meta").layers)
    assert not can_divide_sequences(build_layer_stack("resnet-tiny", {}, device="meta").layers)


def test_a_layer_of_one_rank_is_the_layer_itself():
    layer = build_layer_stack("gpt-tiny", {}, device="meta").layers[1]
    assert divide_sequence(layer, ContextParallelRank(), 16) is layer
