"""Away: by how much updates that are still under way hold up the step that follows.

Where optimizer state lives beyond the near tier, a step ends while its updates go on. A layer's
first pass in the next step, or what gathers its shards before, waits for its own; those of a stage
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
    """Updates that go on beside the next step, a row for each way to share."""

    seconds: Floats
    """That an update takes, by kind of layer."""
    gather: Floats
    """That it takes to gather a layer's shards, by kind; 0 where none are shared."""
    begin: Floats
    """When the first update of a stage of each sort (columns) begins, from when its passes end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstPassCosts:
    """First passes of a step if nothing holds them up, a row for each way to run them."""

    forward: LayerSums
    load: Floats
    """Seconds before the first of them."""
    message: Floats
    """Seconds of sending an output on."""
    alike: Bools
    """Of each layer but the last whether the next one is alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentTiedWeights:
    """Weights that a layer on one stage borrows from its owner on another.

    They leave before the first pass of their owner's stage.
    """

    layer: int
    owner: int
    seconds: Floats
    """Of each way to run the passes, that they take to come."""


def update_delay(
    parts: StagePartition,
    updates: PendingUpdates,
    firsts: FirstPassCosts,
    lent: SentTiedWeights | None,
) -> MaxPlus:
    """Seconds by which first passes are late, if the passes of all stages end with the step.

    The things are stages. Where the passes of a stage end before, so much is off.

    Args:
        parts: of the plans.
        updates: under way.
        firsts: that wait for them.
        lent: None if none are.
    """
    found = _of_layers(parts, updates, firsts)
    return found if lent is None else found.beside(_of_lent(parts, updates, firsts, lent))


def _of_layers(parts: StagePartition, updates: PendingUpdates, firsts: FirstPassCosts) -> MaxPlus:
    """Of all layers that may decide, on the stages of their chunks.

    What is shared is gathered before the first pass of its chunk, all else is waited for before
    that of its own layer.
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
    """Of weights that are lent, on the stage of their owner."""
    there, _ = _ready(parts, updates, np.array([lent.owner]))
    begin = parts.ends[int(parts.chunk[lent.owner])]
    came, begun = _came(parts, firsts, np.array([lent.layer, begin]))
    # Without updates under way it would have come by then, or been waited for.
    due = np.maximum(came, lent.seconds)
    return MaxPlus(
        passes=np.stack([lent.seconds - due, -begun]),
        exchanges=there,
        shared=np.zeros(2, dtype=np.int64),
        things=np.full(2, parts.stage[lent.owner]),
    )


def _came(parts: StagePartition, firsts: FirstPassCosts, layers: Ints) -> Floats:
    """When first passes of layers (rows) begin if nothing holds them up."""
    before = firsts.forward.over_each(0, layers)
    return np.asarray(before + firsts.load + firsts.message * parts.chunk[layers][:, None])


def _ready(parts: StagePartition, updates: PendingUpdates, layers: Ints) -> tuple[Floats, Ints]:
    """When layers are up to date, and all of their chunks behind them is gathered.

    The layers of a chunk are gathered before its first pass, each once it is up to date.

    Returns:
        A row for each time that differs, and of each layer its row.
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
    """Of each layer whether it is at an end of a run of equal ones in its chunk."""
    same = np.concatenate([[False], alike & (np.diff(parts.chunk) == 0), [False]])
    return np.asarray(~(same[:-1] & same[1:]))
