"""Delay of a step by updates of the previous step that are still running.

With offloaded optimizer state, a step ends while its updates go on. A layer's first pass in the
next step, or the gather of its shards before it, waits for its own update; the updates of a stage
come one after the other, in the order of its layers. Of equal layers in a row one of both ends
decides.
"""

from dataclasses import dataclass

import numpy as np

from windlass.cost.arrays import Bools, Floats, Ints
from windlass.cost.batched.max_plus import MaxPlus
from windlass.cost.batched.stage_sums import LayerSums, StagePartition


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingUpdates:
    """Updates that overlap with the next step, `[option, ...]`."""

    seconds: Floats
    """Seconds of an update, `[option, kind]`."""
    gather: Floats
    """Seconds to gather a layer's shards, `[option, kind]`; 0 if nothing is sharded."""
    begin: Floats
    """Start of a stage's first update after its passes end, `[option, stage sort]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstPassCosts:
    """First passes of a step without delays, `[config]`."""

    forward: LayerSums
    load: Floats
    """Seconds before the first of them."""
    message: Floats
    """Seconds to send an output on."""
    alike: Bools
    """Whether each layer but the last equals the next one, `[layer]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentTiedWeights:
    """Tied weights that a stage sends to another one.

    They leave before the first pass of their owner's stage.
    """

    layer: int
    owner: int
    seconds: Floats
    """Seconds until they arrive, `[config]`."""


def update_delay(
    parts: StagePartition,
    updates: PendingUpdates,
    firsts: FirstPassCosts,
    lent: SentTiedWeights | None,
) -> MaxPlus:
    """Delay of the first passes of each stage if all stages' passes end with the step.

    If the passes of a stage end earlier, that much less.

    Args:
        parts: partition of the layers.
        updates: updates that are still running.
        firsts: first passes that wait for them.
        lent: tied weights that are sent; None for none.
    """
    found = _of_layers(parts, updates, firsts)
    return found if lent is None else found.beside(_of_lent(parts, updates, firsts, lent))


def _of_layers(parts: StagePartition, updates: PendingUpdates, firsts: FirstPassCosts) -> MaxPlus:
    """Delays by all layers that may decide, on the stages of their chunks.

    Shards are gathered before the first pass of their chunk; other layers are waited for before
    their own first pass.
    """
    layers = np.flatnonzero(_decisive(parts, firsts.alike))
    begins = np.array(parts.ends)[parts.chunk[layers]]
    gathers = updates.gather.any(axis=1)
    ready, shared = _ready(parts, updates, layers)
    kinds = [(begins, gathers), (layers, ~gathers)]
    some = [(whose, np.where(these, ready, -np.inf)) for whose, these in kinds if these.any()]
    return MaxPlus(
        passes=np.concatenate([-_came(parts, firsts, whose) for whose, _ in some]),
        exchanges=np.concatenate([exchanges for _, exchanges in some]),
        shared=np.concatenate([shared + at * len(ready) for at in range(len(some))]),
        things=np.tile(parts.stage[layers], len(some)),
    )


def _of_lent(
    parts: StagePartition, updates: PendingUpdates, firsts: FirstPassCosts, lent: SentTiedWeights
) -> MaxPlus:
    """Delay by tied weights that are sent, on their owner's stage."""
    there, _ = _ready(parts, updates, np.array([lent.owner]))
    begin = parts.ends[int(parts.chunk[lent.owner])]
    came, begun = _came(parts, firsts, np.array([lent.layer, begin]))
    # Without running updates it would have arrived by then, or been waited for.
    due = np.maximum(came, lent.seconds)
    return MaxPlus(
        passes=np.stack([lent.seconds - due, -begun]),
        exchanges=there,
        shared=np.zeros(2, dtype=np.int64),
        things=np.full(2, parts.stage[lent.owner]),
    )


def _came(parts: StagePartition, firsts: FirstPassCosts, layers: Ints) -> Floats:
    """Start of the first passes of layers without delays, `[layer, config]`."""
    before = firsts.forward.over_each(0, layers)
    return np.asarray(before + firsts.load + firsts.message * parts.chunk[layers][:, None])


def _ready(parts: StagePartition, updates: PendingUpdates, layers: Ints) -> tuple[Floats, Ints]:
    """Time at which layers are updated, and all later ones of their chunks gathered.

    The layers of a chunk are gathered before its first pass, each once it is updated.

    Returns:
        A row for each distinct time, and the row of each layer.
    """
    chunk, ends = parts.chunk[layers], np.array(parts.ends)
    own = parts.counts(ends[:-1], ends[1:]).reshape(-1, parts.shape.pipeline, parts.kinds.max() + 1)
    earlier = (np.cumsum(own, axis=0) - own).reshape(parts.shape.chunks, -1)
    updated = earlier[chunk] + parts.counts(ends[chunk], layers + 1)
    gathered = parts.counts(layers, ends[chunk + 1])
    sort = parts.sort[parts.stage[layers]]
    kinds, shared = np.unique(
        np.concatenate([sort[:, None], updated, gathered], axis=1), axis=0, return_inverse=True
    )
    sort, (updated, gathered) = kinds[:, 0].astype(int), np.split(kinds[:, 1:], 2, axis=1)
    ready = updates.begin.T[sort] + updated @ updates.seconds.T + gathered @ updates.gather.T
    return np.asarray(ready), shared.reshape(-1)


def _decisive(parts: StagePartition, alike: Bools) -> Bools:
    """Whether each layer is at an end of a row of equal ones in its chunk, `[layer]`."""
    same = np.concatenate([[False], alike & (np.diff(parts.chunk) == 0), [False]])
    return np.asarray(~(same[:-1] & same[1:]))
