"""Max-plus sums: the largest of sums of a number of a config and a number of a sharding option.

A plan is a config of its passes with a sharding option. Each number is computed once for each
config or option, and plans only add and compare.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from windlass.cost.arrays import Floats, Ints


class MaxPlusTerm(NamedTuple):
    """One sum, for many plans."""

    passes: Floats
    """Number of each config, `[config]`."""
    exchanges: Floats
    """Number of each sharding option, `[option]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxPlus:
    """The largest of a few sums for each item, such as each stage."""

    passes: Floats
    """Numbers of configs, `[sum, config]`."""
    exchanges: Floats
    """Distinct numbers of sharding options, `[distinct, option]`."""
    shared: Ints
    """Row of `exchanges` of each sum, `[sum]`."""
    things: Ints
    """Item of each sum, `[sum]`."""

    @classmethod
    def of_terms(cls, things: Sequence[Sequence[MaxPlusTerm]]) -> "MaxPlus":
        """The sums of each item, at least one for each."""
        terms = [term for thing in things for term in thing]
        known: dict[bytes, int] = {}
        shared = [known.setdefault(term.exchanges.tobytes(), len(known)) for term in terms]
        _, first = np.unique(shared, return_index=True)
        return cls(
            passes=np.stack([term.passes for term in terms]),
            exchanges=np.stack([terms[at].exchanges for at in first]),
            shared=np.array(shared),
            things=np.repeat(np.arange(len(things)), [len(thing) for thing in things]),
        )

    def beside(self, other: "MaxPlus") -> "MaxPlus":
        """The same with more sums of the same items."""
        return MaxPlus(
            passes=np.concatenate([self.passes, other.passes]),
            exchanges=np.concatenate([self.exchanges, other.exchanges]),
            shared=np.concatenate([self.shared, other.shared + len(self.exchanges)]),
            things=np.concatenate([self.things, other.things]),
        )

    def of(self, run: Ints, pair: Ints) -> Floats:
        """The largest sum of each item, `[item, plan]`."""
        order = np.argsort(self.things, kind="stable")
        sums = self.passes[order][:, run] + self.exchanges[self.shared[order]][:, pair]
        firsts = np.flatnonzero(np.diff(self.things[order], prepend=-1))
        return np.asarray(np.maximum.reduceat(sums, firsts, axis=0))

    def of_plans(self, run: Ints, pair: Ints) -> Floats:
        """The largest sum of all items, `[plan]`.

        Where numbers of options are equal, the largest number of configs stands for all.
        """
        shared, passes = self.shared, self.passes
        if (np.diff(shared) < 0).any():
            order = np.argsort(shared, kind="stable")
            shared, passes = shared[order], passes[order]
        firsts = np.flatnonzero(np.diff(shared, prepend=-1))
        own = np.maximum.reduceat(passes, firsts, axis=0)
        return _largest(own, self.exchanges[shared[firsts]], run, pair)

    def spread(self, kinds: Ints) -> "MaxPlus":
        """The same for other sharding options, given the index of the option that each is like."""
        return replace(self, exchanges=self.exchanges[:, kinds])

    def with_things(self, exchanges: Floats) -> "MaxPlus":
        """The same with another number of each sharding option added, `[item, option]`."""
        both, shared = np.unique(np.stack([self.shared, self.things]), axis=1, return_inverse=True)
        more = self.exchanges[both[0]] + exchanges[both[1]]
        return replace(self, exchanges=more, shared=shared.reshape(-1))


def largest_sum(own: Floats, other: Floats, run: Ints, pair: Ints) -> Floats:
    """The largest of `own[run] + other[pair]` over all columns, `[plan]`.

    Args:
        own: numbers of configs, `[config, sum]`.
        other: numbers of sharding options, `[option, sum]`.
        run: config of each plan.
        pair: sharding option of each plan.
    """
    return _largest(np.ascontiguousarray(own.T), np.ascontiguousarray(other.T), run, pair)


def _largest(own: Floats, other: Floats, run: Ints, pair: Ints) -> Floats:
    """The same with arrays `[sum, ...]`."""
    found = own[0][run] + other[0][pair]
    for mine, its in zip(own[1:], other[1:], strict=True):
        np.maximum(found, mine[run] + its[pair], out=found)
    return np.asarray(found)
