"""Away: by how much updates that are still under way hold up the step that follows.

Where optimizer state lives beyond the near tier, a step ends while its updates go on. A layer's
first pass in the next step, or what gathers its shards before, waits for its own; those of a stage
come one after the other, in the order of its layers. Of equal layers in a row one of both ends
decides.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from windlass.cost.closed_layers import Floats
from windlass.cost.closed_parts import LayerSums, Parts
from windlass.cost.closed_sums import Sums, Term


@dataclass(frozen=True, slots=True, kw_only=True)
class UnderWay:
    """Updates that go on beside the next step, a row for each way to share."""

    seconds: Floats
    """That an update takes, by kind of layer."""
    gather: Floats
    """That it takes to gather a layer's shards, by kind; 0 where none are shared."""
    begin: Floats
    """When the first update of a stage of each sort (columns) begins, from when its passes end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Firsts:
    """First passes of a step if nothing holds them up, a row for each way to run them."""

    forward: LayerSums
    load: Floats
    """Seconds before the first of them."""
    message: Floats
    """Seconds of sending an output on."""
    alike: npt.NDArray[np.bool_]
    """Of each layer but the last whether the next one is alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lent:
    """Weights that a layer on one stage borrows from its owner on another.

    They leave before the first pass of their owner's stage.
    """

    layer: int
    owner: int
    seconds: Floats
    """Of each way to run the passes, that they take to come."""


def held_up(parts: Parts, updates: UnderWay, firsts: Firsts, lent: Lent | None) -> Sums:
    """Seconds by which first passes are late, if the passes of all stages end with the step.

    The things are stages. Where the passes of a stage end before, so much is off.

    Args:
        parts: of the plans.
        updates: under way.
        firsts: that wait for them.
        lent: None if none are.
    """
    gathers = updates.gather.any(axis=1)
    terms: list[list[Term]] = [[] for _ in range(parts.shape.pipeline)]
    for chunk in range(parts.shape.chunks):
        stage = chunk % parts.shape.pipeline
        low, high = parts.ends[chunk : chunk + 2]
        came = -_came(parts, firsts, low)
        for at in _decisive(low, high, firsts.alike):
            ready = _ready(parts, updates, at)
            terms[stage].append(Term(came, np.where(gathers, ready, -np.inf)))
            own = -_came(parts, firsts, at)
            terms[stage].append(Term(own, np.where(gathers, -np.inf, ready)))
    if lent is not None:
        there = _ready(parts, updates, lent.owner)
        begin = parts.ends[int(parts.chunk[lent.owner])]
        # Without updates under way it would have come by then, or been waited for.
        due = np.maximum(_came(parts, firsts, lent.layer), lent.seconds)
        stage = int(parts.stage[lent.owner])
        terms[stage].append(Term(lent.seconds - due, there))
        terms[stage].append(Term(-_came(parts, firsts, begin), there))
    return Sums.of_terms(terms)


def _came(parts: Parts, firsts: Firsts, layer: int) -> Floats:
    """When a layer's first pass begins if nothing holds it up."""
    before = firsts.forward.over(0, layer)
    return np.asarray(before + firsts.load + firsts.message * int(parts.chunk[layer]))


def _ready(parts: Parts, updates: UnderWay, layer: int) -> Floats:
    """When a layer is up to date, and all of its chunk behind it is gathered.

    The layers of a chunk are gathered before its first pass, each once it is up to date.
    """
    stage, chunk = int(parts.stage[layer]), int(parts.chunk[layer])
    ready = updates.begin[:, parts.sort[stage]].copy()
    for earlier in range(stage, chunk, parts.shape.pipeline):
        ready += parts.over(updates.seconds, *parts.ends[earlier : earlier + 2])
    ready += parts.over(updates.seconds, parts.ends[chunk], layer + 1)
    return ready + parts.over(updates.gather, layer, parts.ends[chunk + 1])


def _decisive(low: int, high: int, alike: npt.NDArray[np.bool_]) -> Iterator[int]:
    """The ends of runs of equal layers."""
    for at in range(low, high):
        if at in (low, high - 1) or not (alike[at - 1] and alike[at]):
            yield at
