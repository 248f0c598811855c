"""Sums of something of a run and something of a pair, of which the largest counts.

A plan is a run of its passes with a pair by which replicas share state. What is the largest of sums
of both is found once for each of them, and plans only add and compare.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from windlass.cost.arrays import Floats, Ints


class MaxPlusTerm(NamedTuple):
    """A sum, for many plans."""

    passes: Floats
    """Of each way to run the passes."""
    exchanges: Floats
    """Of each way to share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxPlus:
    """The largest of a few sums for each of some things, such as stages."""

    passes: Floats
    """A row for each sum, a column for each way to run the passes."""
    exchanges: Floats
    """A row for each that differs, a column for each way to share."""
    shared: Ints
    """Of each sum the row of its exchanges."""
    things: Ints
    """Of each sum what it is of."""

    @classmethod
    def of_terms(cls, things: Sequence[Sequence[MaxPlusTerm]]) -> "MaxPlus":
        """Those of each thing, at least one."""
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
        """With more sums of the same things."""
        return MaxPlus(
            passes=np.concatenate([self.passes, other.passes]),
            exchanges=np.concatenate([self.exchanges, other.exchanges]),
            shared=np.concatenate([self.shared, other.shared + len(self.exchanges)]),
            things=np.concatenate([self.things, other.things]),
        )

    def of(self, run: Ints, pair: Ints) -> Floats:
        """Of plans (columns) each thing (rows)."""
        order = np.argsort(self.things, kind="stable")
        sums = self.passes[order][:, run] + self.exchanges[self.shared[order]][:, pair]
        firsts = np.flatnonzero(np.diff(self.things[order], prepend=-1))
        return np.asarray(np.maximum.reduceat(sums, firsts, axis=0))

    def of_plans(self, run: Ints, pair: Ints) -> Floats:
        """The largest of all things, of each plan.

        Where exchanges are equal, the largest of the passes stands for all.
        """
        shared, passes = self.shared, self.passes
        if (np.diff(shared) < 0).any():
            order = np.argsort(shared, kind="stable")
            shared, passes = shared[order], passes[order]
        firsts = np.flatnonzero(np.diff(shared, prepend=-1))
        own = np.maximum.reduceat(passes, firsts, axis=0)
        return _largest(own, self.exchanges[shared[firsts]], run, pair)

    def spread(self, kinds: Ints) -> "MaxPlus":
        """The same for each of other ways to share, by the one that it is like."""
        return replace(self, exchanges=self.exchanges[:, kinds])

    def with_things(self, exchanges: Floats) -> "MaxPlus":
        """With something more of each way to share, by thing (rows)."""
        both, shared = np.unique(np.stack([self.shared, self.things]), axis=1, return_inverse=True)
        more = self.exchanges[both[0]] + exchanges[both[1]]
        return replace(self, exchanges=more, shared=shared.reshape(-1))


def largest_sum(own: Floats, other: Floats, run: Ints, pair: Ints) -> Floats:
    """The largest of sums of both, `own[run] + other[pair]`, of each plan.

    Args:
        own: a row for each run.
        other: a row for each pair.
        run: of each plan.
        pair: of each plan.
    """
    return _largest(np.ascontiguousarray(own.T), np.ascontiguousarray(other.T), run, pair)


def _largest(own: Floats, other: Floats, run: Ints, pair: Ints) -> Floats:
    """The same of a row for each sum."""
    found = own[0][run] + other[0][pair]
    for mine, its in zip(own[1:], other[1:], strict=True):
        np.maximum(found, mine[run] + its[pair], out=found)
    return np.asarray(found)
