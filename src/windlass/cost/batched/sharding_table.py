"""Sharding table: all sharding options of a plan space, some of which the plans of each shape use.

Collectives and memory of state are computed once for each entry, whatever the shapes that use it.
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
    """A table of sharding options; entries are `ShardingOptions`, rows are single options."""

    all: tuple[ShardingOptions, ...]

    @cached_property
    def counts(self) -> Ints:
        """Number of options, `[entry]`."""
        return np.array([len(block.options) for block in self.all], dtype=np.int64)

    @cached_property
    def firsts(self) -> Ints:
        """Row of the first option, `[entry]`."""
        return np.asarray(np.cumsum(self.counts) - self.counts)

    @cached_property
    def options(self) -> tuple[ShardingOption, ...]:
        """All options, `[row]`."""
        return tuple(joined.from_iterable(block.options for block in self.all))

    @cached_property
    def degrees(self) -> Ints:
        """Sharding degrees of parameters and optimizer state, `[row, 2]`."""
        found = [(share.parameters, share.optimizer) for share in self.options]
        return np.array(found, dtype=np.int64).reshape(-1, 2)

    @cached_property
    def optimizer_tiers(self) -> tuple[str, ...]:
        """Tiers of optimizer state that occur."""
        return tuple(dict.fromkeys(share.optimizer_tier for share in self.options))

    @cached_property
    def optimizer_tier(self) -> Ints:
        """Index among `optimizer_tiers`, `[row]`."""
        places = {home: at for at, home in enumerate(self.optimizer_tiers)}
        return np.array([places[share.optimizer_tier] for share in self.options], dtype=np.int64)

    def places(self, blocks: Ints) -> Ints:
        """Rows of some entries, in order."""
        counts = self.counts[blocks]
        ends = np.cumsum(counts)
        return np.arange(counts.sum()) + np.repeat(self.firsts[blocks] - ends + counts, counts)

    def states(self, chain: LayerCosts, blocks: Ints) -> StateCosts:
        """Costs of state, `[row, ...]`, filled in for some entries.

        Args:
            chain: costs of layers.
            blocks: entries whose rows are needed; others may be missing.
        """
        if chain not in self._states:
            self._states[chain] = _States(self)
        return self._states[chain].of(chain, blocks)

    def exchanging(self, chain: LayerCosts, blocks: Ints) -> tuple[Ints, Ints]:
        """A number that options of an entry share which communicate alike, `[row]`.

        Args:
            chain: costs of layers.
            blocks: entries that are asked for; numbers of others may be missing.

        Returns:
            The numbers, and how many there are in each entry.
        """
        self.states(chain, blocks)
        known = self._states[chain]
        return known.numbers, known.kinds

    @cached_property
    def _states(self) -> "dict[LayerCosts, _States]":
        return {}


class _States:
    """Costs of a table's rows, computed when they are asked for."""

    def __init__(self, blocks: ShardingTable) -> None:
        self._blocks = blocks
        self._known = np.zeros(len(blocks.all), dtype=bool)
        self._rows: StateCosts | None = None
        self.numbers = np.zeros(len(blocks.options), dtype=np.int64)
        """A number that options of an entry share which communicate alike, `[row]`."""
        self.kinds = np.zeros(len(blocks.all), dtype=np.int64)
        """How many such numbers there are, `[entry]`."""

    def of(self, chain: LayerCosts, blocks: Ints) -> StateCosts:
        """The table with the rows of some entries filled in."""
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
        """Numbers the options of some entries by how they communicate."""
        seen = np.concatenate([found.reduce, found.waited, found.gather], axis=1)
        keys = iter([row.tobytes() for row in seen])
        for block in blocks.tolist():
            own: dict[bytes, int] = {}
            first, count = self._blocks.firsts[block], self._blocks.counts[block]
            numbers = [own.setdefault(next(keys), len(own)) for _ in range(count)]
            self.numbers[first : first + count], self.kinds[block] = numbers, len(own)

    def _empty(self, found: StateCosts) -> StateCosts:
        """A table with a row for each option, shaped like the given rows."""
        pairs = len(self._blocks.options)

        def rows(values: Floats) -> Floats:
            return np.full((pairs, *values.shape[1:]), np.nan)

        return StateCosts(
            **{each.name: rows(getattr(found, each.name)) for each in fields(StateCosts)}
        )
