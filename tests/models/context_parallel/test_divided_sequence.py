"""Ranks that divide sequences have all tokens once, and see what a whole sequence would show."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from windlass.models.build import build_layer_stack
from windlass.models.context_parallel.divided_sequence import (
    ContextParallelRank,
    hidden_tokens,
    seen_keys,
)
from windlass.models.context_parallel.token_runs import count_in_runs, rows_at_positions
from windlass.models.context_parallel_layers import (
    can_divide_sequences,
    divide_sequence,
)


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_each_token_is_of_one_rank_which_knows_its_position(degree: int):
    sequence = 2 * degree * 3
    tokens = np.arange(sequence)[None].repeat(2, axis=0)
    found = []
    for index in range(degree):
        rank = ContextParallelRank(degree=degree, index=index)
        own = rank.own_tokens(tokens)
        firsts = rank.first_positions(own.shape[1])
        device = torch.device("cpu")
        positions = count_in_runs(own.shape[1], firsts, device, dtype=torch.int64)
        assert positions.tolist() == own[0].tolist() == own[1].tolist()
        table = torch.arange(sequence)[:, None]
        assert torch.equal(rows_at_positions(table, own.shape[1], firsts)[:, 0], positions)
        found += own[0].tolist()
    assert sorted(found) == list(range(sequence))


@pytest.mark.parametrize("degree", [2, 3, 8])
def test_all_ranks_see_equally_many_tokens_under_a_causal_mask(degree: int):
    sequence = 2 * degree * 5
    ranks = [ContextParallelRank(degree=degree, index=index) for index in range(degree)]
    own = [rank.own_tokens(np.arange(sequence)[None])[0] for rank in ranks]
    assert len({int((positions + 1).sum()) for positions in own}) == 1


def sees(query: int, key: int, *, is_causal: bool, window: int | None) -> bool:
    """Whether a token sees another, by definition."""
    is_near = window is None or abs(query - key) < window
    return is_near and not (is_causal and key > query)


@given(
    st.integers(1, 6), st.integers(0, 20), st.integers(0, 12), st.booleans(),
    st.none() | st.integers(1, 30),
)  # fmt: skip
def test_a_run_of_queries_sees_what_each_of_its_tokens_sees(
    count: int, first: int, behind: int, is_causal: bool, window: int | None
):
    sequence = first + count + behind
    queries = range(first, first + count)
    keys = seen_keys(queries, sequence, is_causal=is_causal, window=window)
    mask = hidden_tokens(queries, keys, torch.zeros(1), is_causal=is_causal, window=window)
    shape = (len(queries), len(keys))
    visible = torch.ones(shape, dtype=torch.bool) if mask is None else mask == 0
    for query in queries:
        shown = {key for at, key in enumerate(keys) if visible[query - first, at]}
        assert shown == {
            key for key in range(sequence) if sees(query, key, is_causal=is_causal, window=window)
        }


def test_only_layers_that_see_other_tokens_by_our_attention_can_be_divided():
    assert can_divide_sequences(build_layer_stack("llama-tiny", {}, device="meta").layers)
    assert can_divide_sequences(build_layer_stack("bert-tiny", {}, device="meta").layers)
    assert not can_divide_sequences(build_layer_stack("resnet-tiny", {}, device="meta").layers)


def test_a_layer_of_one_rank_is_the_layer_itself():
    layer = build_layer_stack("gpt-tiny", {}, device="meta").layers[1]
    assert divide_sequence(layer, ContextParallelRank(), 16) is layer
