"""Peak: bytes of the near tier on the fullest stage of many plans, from sorts of runs and pairs.

Of a run it matters how a layer is computed, not by how many replicas; of a pair whether weights and
state are shared, and what is always there of them. So moments are found for each sort of both, and
plans only add and compare.
"""

from collections.abc import Iterator

import numpy as np

from windlass.cost.closed_layers import Chain, Floats, Ints
from windlass.cost.closed_levels import Shape
from windlass.cost.closed_memory import Fullest, Layout, fullest
from windlass.cost.closed_ops import HELD
from windlass.cost.closed_parts import Parts
from windlass.cost.closed_places import layers_again
from windlass.cost.closed_rows import Again, Rows, Settings, Table
from windlass.cost.closed_sizes import OTHERS, SIZES, Kinds
from windlass.cost.closed_sums import largest_sum


def peak_bytes(chain: Chain, parts: Parts, rows: Rows, always: Floats) -> Floats:
    """What is held at the fullest moment of the fullest stage of each plan.

    Args:
        chain: of layers.
        parts: of the plans.
        rows: the plans.
        always: what is there at any moment of each pair, by sort of stage.
    """
    sorts, there = _there(chain, parts, rows, tuple(parts.sort.tolist()))
    return largest_sum(there, always, sorts.sort, rows.pair)


def stage_bytes(chain: Chain, parts: Parts, rows: Rows, always: Floats) -> Floats:
    """What each stage (columns) of each plan (rows) holds at its fullest; as `peak_bytes`."""
    sorts, there = _there(chain, parts, rows, tuple(range(parts.shape.pipeline)))
    return np.asarray(there[sorts.sort] + always[rows.pair][:, parts.sort])


def _there(
    chain: Chain, parts: Parts, rows: Rows, stages: tuple[int, ...]
) -> tuple["_Sorts", Floats]:
    """What is held of each sort of plans (rows) but for what is always there.

    Args:
        chain: of layers.
        parts: of the plans.
        rows: the plans.
        stages: of each its sort (columns).
    """
    shape = parts.shape
    found = {
        again: fullest(_layout(chain, parts, rows.agains[again]), stages)
        for again in np.unique(rows.again).tolist()
    }
    told = any(each.tells_shards for each in found.values())
    sorts = _Sorts(chain, shape, rows, told=told)
    there = np.empty((sorts.count, 1 + max(stages)))
    for again, chosen in sorts.by_again():
        sizes, own = _sizes(chain, rows.settings, sorts, chosen)
        nbytes = _bytes(found[again], sizes, sorts.micros[chosen] - shape.settled)
        there[chosen] = (nbytes + own).T
    return sorts, there


class _Sorts:
    """Sorts of plans whose stages are as full, but for what is always there.

    Of rts and rts' it matters whether they are above 1, and how far only where shards are told.
    """

    def __init__(self, chain: Chain, shape: Shape, rows: Rows, *, told: bool) -> None:
        shards = rows.pairs[:, 1]
        if not told:
            shards = np.minimum(shards, 2)
        pairs = shards * 2 + (rows.pairs[:, 0] > 1)
        kinds, of_pair = np.unique(pairs, return_inverse=True)
        looked_up = _looked_up(chain, rows)
        runs, of_run = _runs_alike(shape, rows, looked_up)
        sort = of_run[rows.run] * len(kinds) + of_pair[rows.pair]
        there = np.zeros(len(runs) * len(kinds), dtype=bool)
        there[sort] = True
        self.sort: Ints = (np.cumsum(there) - 1)[sort]
        """Of each plan."""
        run, kind = np.divmod(np.flatnonzero(there), len(kinds))
        self.count = len(run)
        self.again: Ints = rows.again[runs[run]]
        self.micros: Floats = rows.micros[runs[run]].astype(np.float64)
        self.looked_up: Floats = looked_up[runs[run]]
        self.settings: Ints = rows.setting[runs[run]]
        self.shards: Floats = (kinds[kind] // 2).astype(np.float64)
        self.shares = kinds[kind] % 2 > 0

    def by_again(self) -> Iterator[tuple[int, Ints]]:
        """What is computed again, each time with the sorts of which that holds."""
        for again in np.unique(self.again).tolist():
            yield again, np.flatnonzero(self.again == again)


def _runs_alike(shape: Shape, rows: Rows, looked_up: Floats) -> tuple[Ints, Ints]:
    """Runs of all sorts of memory, and of each run which of these it is like.

    How many replicas there are does not matter, nor how many micro-batches, but for an order that
    holds all of them, and for rows that are looked up in each.
    """
    micros = rows.micros if shape.repeats and shape.order == "gpipe" else np.zeros_like(rows.micros)
    keys = np.stack([rows.settings.alone[rows.setting], rows.again, micros, *looked_up.T])
    _, first, alike = np.unique(_as_one(keys), return_index=True, return_inverse=True)
    return first, alike


def _as_one(columns: Floats) -> Ints:
    """A number for each column of numbers that equal ones share."""
    found = np.zeros(columns.shape[1], dtype=np.int64)
    for row in columns:
        _, own = np.unique(row, return_inverse=True)
        found = found * (int(own.max()) + 1) + own
    return found


def _looked_up(chain: Chain, rows: Rows) -> Floats:
    """What looked-up rows of earlier micro-batches take in each run, by kind of layer."""
    settings = rows.settings
    before = settings.micro[rows.setting] * (rows.micros - 1)
    both = settings.tensor[rows.setting] * (int(before.max()) + 1) + before
    _, first, alike = np.unique(both, return_index=True, return_inverse=True)
    asked = zip(settings.some(rows.setting[first]), before[first].tolist(), strict=True)
    return np.stack([chain.rows(each.tensor, sequences) for each, sequences in asked])[alike]


def _layout(chain: Chain, parts: Parts, again: Again) -> Layout:
    modes = layers_again(parts.shape, parts.ends, again)
    whole = [mode == "layer" for mode in modes]
    return Layout(
        shape=parts.shape,
        ends=parts.ends,
        layers=tuple(zip(chain.kinds_as(modes).tolist(), whole, strict=True)),
        kinds=Kinds(
            looks_up=tuple(kind.looks_up for kind in chain.numbered),
            bare=tuple(kind.parameter_count == 0 for kind in chain.numbered),
        ),
        loan=chain.tied[0] if chain.tied else None,
    )


def _bytes(found: Fullest, sizes: Floats, beyond: Floats) -> Floats:
    """Bytes of each sort of stage (rows) of some sorts of plans (columns).

    Args:
        found: moments.
        sizes: a row for each sort of plans.
        beyond: of each its micro-batches after the settled ones.
    """
    used = found.counts.any(axis=0)
    nbytes = found.counts[:, used] @ sizes[:, used].T
    if found.growth is not None:
        nbytes += (found.growth @ sizes.T) * beyond
    return np.asarray(np.maximum.reduceat(nbytes, found.firsts, axis=0))


def _sizes(
    chain: Chain, settings: Settings, sorts: "_Sorts", chosen: Ints
) -> tuple[Floats, Floats]:
    """Of some sorts of plans the sizes that moments count, and bytes of the process itself."""
    found = _numbers(chain, settings).at(sorts.settings[chosen])
    by_kind, rest = found[:, :-_REST], found[:, -_REST:]
    each = by_kind.reshape(len(chosen), len(HELD), -1).swapaxes(0, 1)
    held = dict(zip(HELD, each, strict=True))
    tokens, wide, narrow, lent, own = np.split(rest, _REST, axis=1)
    shards, shares = sorts.shards[chosen, None], sorts.shares[chosen, None]
    flat, converts = shards > 1, wide != narrow
    sums = held["gradients"] + sorts.looked_up[chosen]
    shard = np.where(flat, held["gradients"] / shards, sums)
    sizes: dict[str, Floats] = {
        "output": held["output"],
        "kept": held["kept"],
        "forward": np.maximum(held["forward_peak"], held["output"] + held["kept"]),
        "again": np.maximum(held["forward_peak"], held["output"]),
        "backward": held["backward_peak"],
        "fresh": held["fresh"],
        "largest": held["largest"] * (flat | converts),
        "converted": held["largest"] * converts,
        "sums": sums,
        "shard": shard,
        "flat": shard * flat,
        "whole": held["weights"] * shares,
        "tokens": tokens,
        "lent gradient": lent * wide,
        "lent weights": lent * narrow,
    }
    return np.concatenate([sizes[name] for name in (*SIZES, *OTHERS)], axis=1), own[:, 0]


_REST = 5
"""Numbers of a setting beside what its passes hold."""


def _numbers(chain: Chain, settings: Settings) -> Table:
    """Of each setting what passes hold by kind of layer, and `_REST` behind it.

    These are bytes of a micro-batch's tokens, of a gradient and of a weight, elements that are
    lent, and bytes of the process itself.
    """
    device = chain.machine.device

    def of(places: Ints) -> Floats:
        passes = chain.passes(settings.some(places))
        compiled = settings.compiled[places]
        own = np.where(compiled, *(device.process_bytes(compiled=each) for each in (True, False)))
        rest = np.column_stack([passes.widths, passes.lent, own])
        return np.concatenate([passes.held.reshape(len(places), -1), rest], axis=1)

    return settings.table(chain, "held", of)
