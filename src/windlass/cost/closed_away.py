"""Away: by how much updates that are still under way hold up the step that follows.

Where optimizer state lives beyond the near tier, a step ends while its updates go on. A layer's
first pass in the next step, or what gathers its shards before, waits for its own; those of a stage
come one after the other, in the order of its layers.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.intp]


class UnderWay(NamedTuple):
    """Updates of plans (rows) that go on beside the next step, by layer of the chain (columns)."""

    seconds: _Floats
    """That each takes."""
    gather: _Floats
    """That it takes to gather a layer's shards; 0 where none are shared."""
    begin: _Floats
    """Of each stage: when its first update begins, from the begin of the next step."""


class Lent(NamedTuple):
    """Weights that a layer on one stage borrows from its owner on another."""

    layer: int
    owner: int
    seconds: _Floats
    """Of plans, that they take to come."""


def first_passes(forward: _Floats, load: _Floats, message: _Floats, chunk: _Ints) -> _Floats:
    """Seconds of a step at which each layer's first pass begins if nothing holds it up.

    Args:
        forward: of plans and layers, what the pass takes.
        load: of plans, before the first of them.
        message: of plans, to send an output on.
        chunk: of each layer.
    """
    return np.asarray(
        np.cumsum(forward, axis=1) - forward + load[:, None] + message[:, None] * chunk
    )


def held_up(
    chunk: _Ints, stage: _Ints, came: _Floats, updates: UnderWay, lent: Lent | None
) -> _Floats:
    """Seconds by which first passes are late, of each plan.

    Args:
        chunk: of each layer.
        stage: of each layer.
        came: of plans and layers, when the layer's first pass would begin.
        updates: of the same plans.
        lent: weights that leave before the first pass of their owner's stage; None if none do.
    """
    order = np.argsort(stage, kind="stable")
    ready = np.empty_like(updates.seconds)
    ready[:, order] = _within(updates.seconds[:, order], stage[order])
    ready += updates.begin[:, stage]
    # The layers of a chunk are gathered before its first pass, each once it is up to date.
    until = _within(updates.gather, chunk)
    ready += until[:, np.searchsorted(chunk, chunk, side="right") - 1] - until + updates.gather
    gathers = np.any(updates.gather > 0, axis=1)[:, None]
    first = np.searchsorted(chunk, chunk)
    late = (ready - np.where(gathers, came[:, first], came)).max(axis=1)
    if lent is not None:
        there = ready[:, lent.owner]
        # Without updates under way it would have come by then, or been waited for.
        due = np.maximum(came[:, lent.layer], lent.seconds)
        late = np.maximum(late, there + lent.seconds - due)
        late = np.maximum(late, there - came[:, first[lent.owner]])
    return np.asarray(np.maximum(late, 0.0))


def _within(values: _Floats, group: _Ints) -> _Floats:
    """For each layer the sum up to it, from the first of its group on; groups lie together."""
    total = np.cumsum(values, axis=1)
    return np.asarray(total - (total - values)[:, np.searchsorted(group, group)])
