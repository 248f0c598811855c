"""Sizes of the feed-forward section: its products, its memory and what it moves (without torch)."""

from typing import NamedTuple

TILE_TOKENS = 128
"""Tokens whose inner features are in the cache together; `kTileTokens` of the C++ code."""
SECTION_ACTIVATION = "block_feed_forward_activation"
"""Name of what a section does between its products."""


class SectionProduct(NamedTuple):
    """One of the products of a section."""

    name: str
    sizes: tuple[int, int, int, int]
    """Batch, m, n, k of the dense product."""
    kept: int
    """Elements of all kept blocks of its weight."""
    flop: int


class SectionSizes(NamedTuple):
    """Sizes of a pass of a feed-forward `[d] -> [f] -> [d]` of two weights of kept blocks."""

    tokens: int
    width: int
    inner: int
    up_kept: int
    """Elements of the kept blocks of the first weight."""
    down_kept: int
    block: int
    itemsize: int
    backward: bool
    """Whether it is the backward pass."""

    @property
    def products(self) -> tuple[SectionProduct, ...]:
        """The products in their order."""
        t, d, f = self.tokens, self.width, self.inner
        ways = (
            [
                ("down_input_grad", (1, t, f, d), self.down_kept),
                ("up_input_grad", (1, t, d, f), self.up_kept),
                ("up_weight_grad", (1, f, d, t), self.up_kept),
                ("down_weight_grad", (1, d, f, t), self.down_kept),
            ]
            if self.backward
            else [("up", (1, t, f, d), self.up_kept), ("down", (1, t, d, f), self.down_kept)]
        )
        return tuple(
            SectionProduct(f"block_feed_forward_{name}", sizes, kept, 2 * t * kept)
            for name, sizes, kept in ways
        )

    @property
    def moved_bytes(self) -> int:
        """Bytes of inner features that are written, and read back from memory.

        The forward pass writes those before the activation; the backward pass reads them, and both
        writes and reads what the gradients of the weights need.
        """
        return (5 if self.backward else 1) * self.tokens * self.inner * self.itemsize

    @property
    def scratch_bytes(self) -> int:
        """Bytes that are held only while one thread runs it."""
        packed = (self.up_kept + self.down_kept) * self.itemsize
        tile = TILE_TOKENS * (self.inner * self.itemsize + 4 * self.block)
        factors = 2 * self.tokens * (self.width + self.inner) * self.itemsize
        return packed + tile + (factors if self.backward else 0)
