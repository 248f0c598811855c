"""Masks hide of some keys what the tokens at their positions do not see, and nothing else."""

import torch
from hypothesis import given, strategies as st

from windlass.models.positions.visible_tokens import hidden_tokens, limits_that_hide, seen_keys

LIMITS = st.none() | st.integers(0, 30)


def sees(query: int, key: int, earlier: int | None, later: int | None) -> bool:
    """Whether a token sees another, by definition."""
    return (earlier is None or key >= query - earlier) and (later is None or key <= query + later)


@given(st.integers(1, 6), st.integers(0, 20), st.integers(0, 12), LIMITS, LIMITS)
def test_a_run_of_queries_sees_what_each_of_its_tokens_sees(
    count: int, first: int, behind: int, earlier: int | None, later: int | None
):
    whole, queries = range(first + count + behind), range(first, first + count)
    keys = seen_keys(queries, whole, (earlier, later))
    limits = limits_that_hide(queries, keys, (earlier, later))
    mask, full = (
        hidden_tokens(queries, keys, torch.zeros(1), each) for each in (limits, (earlier, later))
    )
    everything = torch.zeros(len(queries), len(keys))
    assert torch.equal(*(everything if each is None else each for each in (mask, full)))
    for query in queries:
        row = everything[0] if mask is None else mask[query - first]
        shown = {key for key, hidden in zip(keys, row.tolist(), strict=True) if not hidden}
        assert shown == {key for key in whole if sees(query, key, earlier, later)}
