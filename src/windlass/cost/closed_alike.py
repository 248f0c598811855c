"""Alike: pairs of a block that exchange alike, of which a run meets but one of each kind.

What replicas exchange does not depend on where their state lives, and not always on how finely it
is shared. So seconds of passes with exchanges are found for a run with each kind of pair, of which
there are several times fewer than plans.
"""

from dataclasses import dataclass

import numpy as np

from windlass.cost.closed_layers import Chain, Ints
from windlass.cost.closed_rows import Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Alike:
    """Kinds of pairs, all of a block in turn, and runs with all of their block's kinds."""

    pairs: Ints
    """Of each kind a pair that is of it."""
    shares: Ints
    """Of each pair its kind."""
    run: Ints
    """Of each run with a kind."""
    share: Ints
    """Of each run with a kind: the kind."""
    place: Ints
    """Of each plan its place among those."""

    @classmethod
    def of(cls, chain: Chain, rows: Rows) -> "Alike":
        """Those of some plans."""
        numbers, counts = rows.table.exchanging(chain, rows.shared)
        own, kinds = numbers[rows.places], counts[rows.shared]
        firsts = np.cumsum(kinds) - kinds
        shares = own + np.repeat(firsts, rows.table.counts[rows.shared])
        pairs = np.zeros(kinds.sum(), dtype=np.int64)
        pairs[shares[::-1]] = np.arange(len(shares))[::-1]
        block = np.searchsorted(rows.shared, rows.block)
        of_run = kinds[block]
        begins = np.cumsum(of_run) - of_run
        run = np.repeat(np.arange(len(block)), of_run)
        return cls(
            pairs=pairs,
            shares=shares,
            run=run,
            share=np.arange(len(run)) + np.repeat(firsts[block] - begins, of_run),
            place=begins[rows.run] + own[rows.pair],
        )
