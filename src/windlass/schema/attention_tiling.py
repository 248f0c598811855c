"""Tiles of plain attention: which keys the queries of a part of a sequence are multiplied with."""

from typing import NamedTuple

_MOST_TILES = 4
"""Most tiles into which plain attention divides the queries of a sequence under a causal mask: each
is multiplied with the keys up to its last token only. More would skip little more."""

_FEWEST_ROWS = 128
"""Fewest queries of such a tile: narrower products of scores are slow."""

_FEWEST_WINDOW_ROWS = 256
"""Fewest queries of a tile under a window of tokens: tiles as long as the window are as fast as
shorter ones, and a compiler has fewer of them to unroll."""


class AttentionTile(NamedTuple):
    """Queries of a sequence, and the keys that any of them sees, as half-open ranges of tokens."""

    queries: tuple[int, int]
    keys: tuple[int, int]


def attention_tiles(
    sequence: int, earlier: int | None, later: int | None
) -> tuple[AttentionTile, ...]:
    """The tiles of plain attention; a single one if every token sees all.

    Args:
        earlier: how many tokens before it a token sees; None means all.
        later: the same of those behind it.
    """
    last = sequence - 1
    if min(last if each is None else each for each in (earlier, later)) >= last:
        return (AttentionTile((0, sequence), (0, sequence)),)
    rows = max(_FEWEST_ROWS, -(-sequence // _MOST_TILES))
    if earlier is not None and later is not None:
        rows = min(rows, max(_FEWEST_WINDOW_ROWS, earlier + later + 1))
    tiles = []
    for first in range(0, sequence, rows):
        end = min(first + rows, sequence)
        begin = 0 if earlier is None else max(0, first - earlier)
        seen = sequence if later is None else min(sequence, end + later)
        tiles.append(AttentionTile((first, end), (begin, seen)))
    return tuple(tiles)
