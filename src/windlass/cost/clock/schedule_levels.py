"""Schedule levels: the passes of all stages, by how many others come before each.

Passes of one level do not wait for each other, so the times of all of them are computed at once.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from windlass.cost.arrays import Ints
from windlass.cost.clock.plan_columns import PipelineShape
from windlass.program import PipelinePass, schedule_passes

FORWARD, BACKWARD, WEIGHT = 0, 1, 2
"""Kinds of passes; a split backward has its input gradient in `BACKWARD`."""
_KIND = {"forward": FORWARD, "backward": BACKWARD, "backward_input": BACKWARD,
         "backward_weight": WEIGHT}  # fmt: skip


class EdgePass(NamedTuple):
    """The first forward or the last backward pass of a model chunk, where a stage does more."""

    kind: int
    chunk: int
    needs: int
    """Slot of the message that it waits for; 0 for none."""
    sends: int
    """Slot of the message that it sends; 0 for none."""


class Level(NamedTuple):
    """Passes that do not wait for each other, `[pass]`; edge passes apart."""

    stages: Ints | slice
    rows: Ints
    """Row of each pass's duration: kind of pass, then chunk."""
    needs: Ints
    """Slot of the message that each waits for; 0 for none."""
    senders: Ints
    """Indices of the passes that send a message."""
    sender_stages: Ints | slice
    sender_rows: Ints
    sends: Ints
    """Slots of these messages."""
    loads: Ints
    """Indices of the passes that load a batch first."""
    edges: tuple[EdgePass, ...]


@dataclass(frozen=True, slots=True)
class ScheduleLevels:
    """All passes of a step."""

    levels: tuple[Level, ...]
    slots: int
    """Number of message slots, that for none included."""


class StagePasses(NamedTuple):
    """All passes, `[stage, turn]`, in each stage's order; messages are numbered from 1."""

    kinds: Ints
    micros: Ints
    chunks: Ints
    needs: Ints
    sends: Ints


@lru_cache(maxsize=256)
def schedule_levels(shape: PipelineShape, forward_chunks: int = 0) -> ScheduleLevels:
    """The passes of a step of this many micro-batches.

    Args:
        forward_chunks: model chunks at the front that get no gradient; their backward passes are
            there and wait for nobody.
    """
    passes = stage_passes(shape, forward_chunks)
    depths = _depths(passes)
    slot, slots = _slots(passes, depths, shape.microbatches)
    order = np.argsort(depths.ravel(), kind="stable")
    kinds, micros, chunks, needs, sends = (each.ravel()[order] for each in passes)
    depths, last = depths.ravel()[order], shape.microbatches - 1
    needs, sends = slot[needs], slot[sends]
    first_kind = np.where(micros == 0, 3, 0)
    rows = (kinds + np.where(kinds == FORWARD, 0, first_kind)) * shape.chunks + chunks
    splits = shape.schedule == "zero-bubble"
    ends = (kinds == (WEIGHT if splits else BACKWARD)) & (micros == last)
    if splits:  # no message tells which of them comes first, but gradients of tied weights may
        depths = np.where(ends, depths.max() + shape.chunks - chunks, depths)
        order = np.argsort(depths, kind="stable")
        depths, kinds, micros, chunks, needs, sends, rows, ends = (
            each[order] for each in (depths, kinds, micros, chunks, needs, sends, rows, ends)
        )
    edge = ends | ((kinds == FORWARD) & (micros == 0))
    loads = (kinds == FORWARD) & ((chunks == 0) | (chunks == shape.chunks - 1))
    stages, plain = chunks % shape.pipeline, ~edge
    bounds = np.flatnonzero(np.diff(depths, prepend=-1, append=-1))
    levels = []
    for begin, end in pairwise(bounds.tolist()):
        chosen = begin + np.flatnonzero(plain[begin:end])
        edges = begin + np.flatnonzero(edge[begin:end])
        senders = np.flatnonzero(sends[chosen])
        levels.append(
            Level(
                _span(stages[chosen]),
                rows[chosen],
                needs[chosen],
                senders,
                _span(stages[chosen[senders]]),
                rows[chosen[senders]],
                sends[chosen[senders]],
                np.flatnonzero(loads[chosen]),
                tuple(
                    EdgePass(*(int(each[place]) for each in (kinds, chunks, needs, sends)))
                    for place in edges.tolist()
                ),
            )
        )
    return ScheduleLevels(tuple(levels), slots)


def _span(indices: Ints) -> Ints | slice:
    """The indices, as a slice if they are evenly spaced, which avoids a copy."""
    steps = np.diff(indices)
    if not indices.size or (steps != steps[:1]).any() or (steps <= 0).any():
        return indices
    step = int(steps[0]) if steps.size else 1
    return slice(int(indices[0]), int(indices[-1]) + 1, step)


@lru_cache(maxsize=256)
def stage_passes(shape: PipelineShape, forward_chunks: int = 0) -> StagePasses:
    """All passes with their messages: an output for the next chunk, its gradient for the last."""
    schedule, pipeline, virtual_stages, micros = shape
    numbers: dict[PipelinePass, int] = {}  # stages run the same passes in another order
    turns = [
        [
            numbers.setdefault(item, len(numbers))
            for item in schedule_passes(schedule, pipeline, stage, micros, chunks=virtual_stages)
        ]
        for stage in range(pipeline)
    ]
    passes = [(_KIND[item.kind], item.micro_batch, item.chunk) for item in numbers]
    kinds, micro, part = np.array(passes, dtype=np.int64).T[:, turns]
    chunks = part * pipeline + np.arange(pipeline)[:, None]
    output, gradient = 1 + chunks * micros + micro, 1 + (shape.chunks + chunks) * micros + micro
    forward, backward = kinds == FORWARD, kinds == BACKWARD
    ahead, behind = chunks < shape.chunks - 1, chunks > 0
    awaits, returns = ahead & (chunks >= forward_chunks), chunks > forward_chunks
    needs = np.where(forward & behind, output - micros, np.where(backward & awaits, gradient, 0))
    sends = np.where(forward & ahead, output, np.where(backward & returns, gradient - micros, 0))
    return StagePasses(kinds, micro, chunks, needs, sends)


def _depths(passes: StagePasses) -> Ints:
    """Length of the longest chain of passes before each, `[stage, turn]`."""
    stages, turns = passes.kinds.shape
    depths = np.zeros((stages, turns), dtype=np.int64)
    there = np.zeros(int(passes.sends.max()) + 1, dtype=np.bool_)
    there[0] = True
    needs = np.append(passes.needs, np.zeros((stages, 1), dtype=np.int64), axis=1)
    place, depth = np.zeros(stages, dtype=np.int64), 0
    every = np.arange(stages)
    while (going := place < turns).any():
        ready = np.flatnonzero(going & there[needs[every, place]])
        if not ready.size:
            raise ValueError("stages wait for each other")
        depths[ready, place[ready]] = depth
        there[passes.sends[ready, place[ready]]] = True
        place[ready] += 1
        depth += 1
    return depths


def _slots(passes: StagePasses, depths: Ints, micros: int) -> tuple[Ints, int]:
    """The slot of each message, and the number of slots.

    A chunk receives the messages of another one in the order of their micro-batches, so that a few
    slots for each pair of chunks take turns.
    """
    needed, sent = passes.needs.ravel(), passes.sends.ravel()
    times = np.zeros((2, 1 + int(sent.max()) // micros * micros + micros), dtype=np.int64)
    times[0, needed], times[1, sent] = depths.ravel(), depths.ravel()
    received, begun = times[:, 1:].reshape(2, -1, micros)
    turns = 1
    while turns < micros and (received[:, :-turns] >= begun[:, turns:]).any(
        where=begun[:, turns:] > 0
    ):
        turns += 1
    message = np.arange(times.shape[1] - 1)
    slots = 1 + message // micros * turns + message % micros % turns
    return np.append(0, slots), 1 + len(received) * turns
