"""Which tokens a token sees in attention, by its position."""

import torch
from torch import Tensor

VisibleTokens = tuple[int | None, int | None]
"""How many tokens before a token, and how many behind it, it sees; None means all of them."""


def hidden_tokens(
    queries: range, keys: range, like: Tensor, visible: VisibleTokens
) -> Tensor | None:
    """What is added to scores, `[queries keys]`: minus infinity where a token does not see another.

    Args:
        queries: positions of the tokens that see.
        keys: positions of the tokens that are seen.
        like: a tensor of the type of scores, on their device.

    Returns:
        None if every token sees all.
    """
    earlier, later = visible
    if earlier is None and later is None:
        return None
    shape = len(queries), len(keys)
    hidden = torch.full(shape, float("-inf"), dtype=like.dtype, device=like.device)
    ahead = queries.start - keys.start
    behind = None if later is None else hidden.triu(ahead + later + 1)
    before = None if earlier is None else hidden.tril(ahead - earlier - 1)
    if behind is None or before is None:
        return before if behind is None else behind
    return behind + before


def limits_that_hide(queries: range, keys: range, visible: VisibleTokens) -> VisibleTokens:
    """The limits of `visible` by which some of these queries do not see some of these keys.

    Args:
        queries: positions of the tokens that see.
        keys: positions of the tokens that are seen.
    """
    earlier, later = visible
    hides_earlier = earlier is not None and keys[0] < queries[-1] - earlier
    hides_later = later is not None and keys[-1] > queries[0] + later
    return earlier if hides_earlier else None, later if hides_later else None


def seen_keys(queries: range, within: range, visible: VisibleTokens) -> range:
    """Positions of the keys that any of some adjacent queries sees.

    Args:
        queries: positions of the queries, which are among the keys.
        within: positions of all keys.
    """
    earlier, later = visible
    first = within.start if earlier is None else max(within.start, queries.start - earlier)
    end = within.stop if later is None else min(within.stop, queries.stop + later)
    return range(first, end)
