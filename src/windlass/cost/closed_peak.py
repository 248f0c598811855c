"""Peak: bytes of the near tier on the fullest stage of many plans, from sorts of runs and pairs.

Of a run it matters how a layer is computed, not by how many replicas; of a pair whether weights and
state are shared, and what is always there of them. So moments are found for each sort of both, and
plans only add and compare.
"""

from collections.abc import Iterator

import numpy as np

from windlass.cost.closed_held import held
from windlass.cost.closed_layers import Chain, Floats, Ints
from windlass.cost.closed_levels import Shape
from windlass.cost.closed_memory import Columns, Loaned, fullest, reduces_early
from windlass.cost.closed_ops import HELD
from windlass.cost.closed_parts import Parts
from windlass.cost.closed_places import Layout, Places, layers_again, sorts_of
from windlass.cost.closed_rows import Rows, Settings, Table
from windlass.cost.closed_sums import largest_sum
from windlass.spec.plan import Recompute


def peak_bytes(chain: Chain, parts: Parts, rows: Rows, always: Floats) -> Floats:
    """What is held at the fullest moment of the fullest stage of each plan.

    Args:
        chain: of layers.
        parts: of the plans.
        rows: the plans.
        always: what is there at any moment of each pair, by sort of stage.
    """
    sorts = _Sorts(chain, parts.shape, rows)
    there = np.full((sorts.count, int(parts.sort.max()) + 1), -np.inf)
    for again, chosen in sorts.by_again():
        modes = layers_again(parts.shape, parts.ends, rows.agains[again])
        places = _places(chain, parts, modes)
        found = _moments(chain, places, chain.kinds_as(modes), rows.settings, sorts, chosen)
        for stage, nbytes in zip(places.stages, found, strict=True):
            sort = parts.sort[stage]
            there[chosen, sort] = np.maximum(there[chosen, sort], nbytes)
    return largest_sum(there, always, sorts.sort, rows.pair)


def stage_bytes(chain: Chain, parts: Parts, rows: Rows, always: Floats) -> Floats:
    """What each stage (columns) of each plan (rows) holds at its fullest; as `peak_bytes`."""
    sorts = _Sorts(chain, parts.shape, rows)
    there = np.empty((sorts.count, parts.shape.pipeline))
    for again, chosen in sorts.by_again():
        modes = layers_again(parts.shape, parts.ends, rows.agains[again])
        places = _places(chain, parts, modes, every=True)
        kinds = chain.kinds_as(modes)
        there[chosen] = _moments(chain, places, kinds, rows.settings, sorts, chosen).T
    return np.asarray(there[sorts.sort] + always[rows.pair][:, parts.sort])


class _Sorts:
    """Sorts of plans whose stages are as full, but for what is always there.

    Of rts and rts' it matters whether they are above 1, and only in a few shapes how far.
    """

    def __init__(self, chain: Chain, shape: Shape, rows: Rows) -> None:
        shards = rows.pairs[:, 1]
        if not reduces_early(shape):
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


def _places(
    chain: Chain, parts: Parts, again: tuple[Recompute, ...], *, every: bool = False
) -> Places:
    shape, ends = parts.shape, parts.ends
    alone = (0, chain.layers - 1, *(chain.tied[0] if chain.tied else ()))
    layout = Layout(ends, sorts_of(chain.sorts.tolist(), again, alone), again)
    return Places(shape, layout, held(shape, tuple(np.diff(ends))), every=every)


def _moments(
    chain: Chain, places: Places, kinds: Ints, settings: Settings, sorts: "_Sorts", chosen: Ints
) -> Floats:
    """Bytes of each stage (rows) of some sorts (columns), the process's own among them."""
    found = _numbers(chain, settings).at(sorts.settings[chosen])
    held, rest = found[:, :-_REST], found[:, -_REST:]
    columns = Columns(
        held=held.reshape(len(chosen), len(HELD), -1).swapaxes(0, 1),
        widths=rest[:, :3],
        micros=sorts.micros[chosen],
        rows=sorts.looked_up[chosen],
        shards=sorts.shards[chosen],
        shares=sorts.shares[chosen],
    )
    loan = Loaned(*chain.tied[0], rest[:, 3]) if chain.tied else None
    return np.asarray(fullest(places, kinds, columns, loan).T + rest[:, 4])


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
