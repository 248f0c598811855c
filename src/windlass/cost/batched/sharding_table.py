"""Blocks: ways to share state as one table of their pairs, a part of which each shape's plans take.

What replicas exchange and hold is found once for a block, whatever the shapes it is met in.
"""

from dataclasses import dataclass, fields
from functools import cached_property
from itertools import chain as joined

import numpy as np

from windlass.cost.arrays import Floats, Ints
from windlass.cost.batched.config_keys import ShardingOption, ShardingOptions
from windlass.cost.batched.layer_cost import LayerCosts
from windlass.cost.batched.state_cost import StateCosts


@dataclass(frozen=True, eq=False)
class ShardingTable:
    """A table of blocks, each of them once."""

    all: tuple[ShardingOptions, ...]

    @cached_property
    def counts(self) -> Ints:
        """How many pairs each has."""
        return np.array([len(block.options) for block in self.all], dtype=np.int64)

    @cached_property
    def firsts(self) -> Ints:
        """The place of the first pair of each."""
        return np.asarray(np.cumsum(self.counts) - self.counts)

    @cached_property
    def options(self) -> tuple[ShardingOption, ...]:
        """All pairs of all blocks in turn."""
        return tuple(joined.from_iterable(block.options for block in self.all))

    @cached_property
    def degrees(self) -> Ints:
        """Their rts and rts' (columns)."""
        found = [(share.parameters, share.optimizer) for share in self.options]
        return np.array(found, dtype=np.int64).reshape(-1, 2)

    @cached_property
    def optimizer_tiers(self) -> tuple[str, ...]:
        """The tiers where optimizer state of any lives."""
        return tuple(dict.fromkeys(share.optimizer_tier for share in self.options))

    @cached_property
    def optimizer_tier(self) -> Ints:
        """Of each the place of its tier among `homes`."""
        places = {home: at for at, home in enumerate(self.optimizer_tiers)}
        return np.array([places[share.optimizer_tier] for share in self.options], dtype=np.int64)

    def places(self, blocks: Ints) -> Ints:
        """Where the pairs of some blocks stand, in turn."""
        counts = self.counts[blocks]
        ends = np.cumsum(counts)
        return np.arange(counts.sum()) + np.repeat(self.firsts[blocks] - ends + counts, counts)

    def states(self, chain: LayerCosts, blocks: Ints) -> StateCosts:
        """The table of what pairs hold and exchange, in which the rows of these blocks are found.

        Args:
            chain: of layers.
            blocks: whose rows are needed; others may be missing.
        """
        if chain not in self._states:
            self._states[chain] = _States(self)
        return self._states[chain].of(chain, blocks)

    def exchanging(self, chain: LayerCosts, blocks: Ints) -> tuple[Ints, Ints]:
        """Of each pair its number among those of its block that exchange in another way.

        Args:
            chain: of layers.
            blocks: whose pairs are asked for; numbers of others may be missing.

        Returns:
            The numbers, and for each block how many of them there are.
        """
        self.states(chain, blocks)
        known = self._states[chain]
        return known.numbers, known.kinds

    @cached_property
    def _states(self) -> "dict[LayerCosts, _States]":
        return {}


class _States:
    """Numbers of a table's pairs, found once they are asked for."""

    def __init__(self, blocks: ShardingTable) -> None:
        self._blocks = blocks
        self._known = np.zeros(len(blocks.all), dtype=bool)
        self._rows: StateCosts | None = None
        self.numbers = np.zeros(len(blocks.options), dtype=np.int64)
        """Of each pair one that those of its block share which exchange alike."""
        self.kinds = np.zeros(len(blocks.all), dtype=np.int64)
        """Of each block how many such numbers there are."""

    def of(self, chain: LayerCosts, blocks: Ints) -> StateCosts:
        """The table with the rows of some blocks filled in."""
        missing = blocks[~self._known[blocks]]
        if missing.size or self._rows is None:
            found = chain.states([self._blocks.all[at] for at in missing.tolist()])
            self._rows = self._rows or self._empty(found)
            places = self._blocks.places(missing)
            for each in fields(StateCosts):
                getattr(self._rows, each.name)[places] = getattr(found, each.name)
            self._number(found, missing)
            self._known[missing] = True
        return self._rows

    def _number(self, found: StateCosts, blocks: Ints) -> None:
        """Tells apart what exchanges in another way of some blocks, found in turn."""
        seen = np.concatenate([found.reduce, found.waited, found.gather], axis=1)
        keys = iter([row.tobytes() for row in seen])
        for block in blocks.tolist():
            own: dict[bytes, int] = {}
            first, count = self._blocks.firsts[block], self._blocks.counts[block]
            numbers = [own.setdefault(next(keys), len(own)) for _ in range(count)]
            self.numbers[first : first + count], self.kinds[block] = numbers, len(own)

    def _empty(self, found: StateCosts) -> StateCosts:
        """A table with a row for each pair, of as many columns as was found of some."""
        pairs = len(self._blocks.options)

        def rows(values: Floats) -> Floats:
            return np.full((pairs, *values.shape[1:]), np.nan)

        return StateCosts(
            **{each.name: rows(getattr(found, each.name)) for each in fields(StateCosts)}
        )
