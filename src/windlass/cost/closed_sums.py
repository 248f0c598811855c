"""Sums of something of a run and something of a pair, of which the largest counts.

A plan is a run of its passes with a pair by which replicas share state. What is the largest of sums
of both is found once for each of them, and plans only add and compare.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from windlass.cost.closed_layers import Floats, Ints


class Term(NamedTuple):
    """A sum, for many plans."""

    passes: Floats
    """Of each way to run the passes."""
    exchanges: Floats
    """Of each way to share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """The largest of a few sums for each of some things, such as stages."""

    passes: Floats
    """A row for each way to run the passes, a column for each sum."""
    exchanges: Floats
    """A row for each way to share, a column for each sum."""
    firsts: Ints
    """The first sum of each thing."""

    @classmethod
    def of_terms(cls, things: Sequence[Sequence[Term]]) -> "Sums":
        """Those of each thing, at least one."""
        terms = [term for thing in things for term in thing]
        return cls(
            passes=np.stack([term.passes for term in terms], axis=1),
            exchanges=np.stack([term.exchanges for term in terms], axis=1),
            firsts=np.cumsum([0, *(len(thing) for thing in things[:-1])]),
        )

    def of(self, run: Ints, pair: Ints) -> Floats:
        """Of plans (rows) each thing (columns)."""
        sums = self.passes[run] + self.exchanges[pair]
        return np.asarray(np.maximum.reduceat(sums, self.firsts, axis=1))

    def of_plans(self, run: Ints, pair: Ints) -> Floats:
        """The largest of all things, of each plan."""
        return largest_sum(self.passes, self.exchanges, run, pair)

    def with_things(self, exchanges: Floats) -> "Sums":
        """With something more of each way to share, by thing (columns)."""
        counts = np.diff([*self.firsts, self.exchanges.shape[1]])
        return replace(self, exchanges=self.exchanges + np.repeat(exchanges, counts, axis=1))


def largest_sum(own: Floats, other: Floats, run: Ints, pair: Ints) -> Floats:
    """The largest of sums of both, `own[run] + other[pair]`, of each plan.

    Where columns of the other are equal, the largest of the own ones stands for all.

    Args:
        own: a row for each run.
        other: a row for each pair.
        run: of each plan.
        pair: of each plan.
    """
    columns = np.ascontiguousarray(other.T)
    alike: dict[bytes, list[int]] = {}
    for at, column in enumerate(columns):
        alike.setdefault(column.tobytes(), []).append(at)
    found = np.full(len(run), -np.inf)
    for places in alike.values():
        most = own[:, places].max(axis=1)
        np.maximum(found, most[run] + columns[places[0]][pair], out=found)
    return found
