"""Dependency levels: the passes of all stages by how many others come before them.

Passes of the same depth do not wait for each other, so the times of all of them are computed at
once. A message has a slot from when it is sent until it is received.

Under every schedule the order of fewer micro-batches is that of more with the others left out. So
depths and slots are found once, for as many micro-batches as any shape has.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from windlass.cost.arrays import Bools, Ints
from windlass.cost.batched.schedule_index import BACKWARD, FORWARD, PipelineShape, ScheduleIndex


class DependencyLevel(NamedTuple):
    """Passes that do not wait for each other, `[pass]`."""

    stages: slice | Ints
    rows: Ints
    """Row of each pass's duration, all kinds of passes one after the other."""
    needs: Ints
    """Slot of the message that each pass needs; 0 for none."""
    senders: slice | Ints
    """Indices of the passes that send a message."""
    from_: slice | Ints
    """Stages of these."""
    sends: Ints
    """Slots of these messages."""
    loads: Sequence[int]
    """Indices of the forward passes of the first and the last chunk."""
    firsts: Sequence[tuple[int, int, int]]
    """The first passes of chunks: index, stage and chunk."""
    lasts: Sequence[tuple[int, int, int]]
    """The last backward passes of chunks: index, stage and chunk."""
    turns: int
    """Most chunks that a stage has finished by the end of this level."""


@dataclass(frozen=True, slots=True)
class DependencyLevels:
    """All passes of a step."""

    all: tuple[DependencyLevel, ...]
    places: int
    """Number of message slots, that for none included."""
    settled: int
    """Levels that this has in common with a step of the settled micro-batches, if it has more."""


@lru_cache(maxsize=1024)
def dependency_levels(shape: PipelineShape) -> DependencyLevels:
    """The passes of a shape's stages by how many others come before them."""
    most = max(shape.microbatches, shape.settled + shape.pipeline)
    passes, places = _most(shape._replace(microbatches=most))
    own = passes.only(passes.micros < shape.microbatches)
    other = passes.micros >= shape.settled
    ends = (passes.kinds == BACKWARD) & (passes.micros == shape.settled - 1)
    apart = passes.depths[other | ends].min()
    return DependencyLevels(
        _levels(shape, own), places, len(np.unique(own.depths[own.depths < apart]))
    )


class _Passes(NamedTuple):
    """Passes of all stages by depth, `[pass]`."""

    depths: Ints
    """Length of the longest chain of passes before it."""
    stages: Ints
    kinds: Ints
    """Kind, as `schedule_index` numbers them."""
    micros: Ints
    chunks: Ints
    """Model chunk."""
    needs: Ints
    """The message that it needs, an output or a gradient; 0 for none."""
    sends: Ints
    """The message that it sends; 0 for none."""

    def only(self, chosen: Bools | Ints) -> "_Passes":
        """Some of the passes."""
        return _Passes(*(each[chosen] for each in self))


@lru_cache(maxsize=128)
def _most(shape: PipelineShape) -> tuple[_Passes, int]:
    """The passes of a step with their messages' slots, and the number of slots."""
    pipeline, micros, chunks = shape.pipeline, shape.microbatches, shape.chunks
    turns = ScheduleIndex(shape.schedule, pipeline, shape.virtual_stages, micros).passes()
    kinds, micro, part = (each.ravel() for each in turns)
    stages = np.repeat(np.arange(pipeline), turns.kinds.shape[1])
    chunk = part * pipeline + stages
    forward, backward = kinds == FORWARD, kinds == BACKWARD
    ahead, behind = chunk < chunks - 1, chunk > 0
    output, gradient = 1 + chunk * micros + micro, 1 + (chunks + chunk) * micros + micro
    needs = np.where(forward & behind, output - micros, np.where(backward & ahead, gradient, 0))
    sends = np.where(forward & ahead, output, np.where(backward & behind, gradient - micros, 0))
    depths = _depths(stages, needs, sends)
    passes = _Passes(depths, stages, kinds, micro, chunk, needs, sends)
    return _placed(passes.only(np.argsort(depths, kind="stable")))


def _depths(stages: Ints, needs: Ints, sends: Ints) -> Ints:
    """Length of the longest chain of passes before each."""
    need, send = needs.tolist(), sends.tolist()
    sent = [-1] * (max(send) + 1)
    sent[0] = 0
    ends = [*np.flatnonzero(np.diff(stages, prepend=-1)).tolist(), len(need)]
    at, depths = ends[:-1], [0] * len(need)
    reached = [0] * len(at)
    while at != ends[1:]:
        before = at[:]
        for stage, end in enumerate(ends[1:]):
            place, now = at[stage], reached[stage]
            while place < end and (came := sent[need[place]]) >= 0:
                now = max(now, came) + 1
                depths[place] = now
                if send[place]:
                    sent[send[place]] = now
                place += 1
            at[stage], reached[stage] = place, now
        if at == before:
            raise ValueError("stages wait for each other")
    return np.array(depths) - 1


def _placed(passes: _Passes) -> tuple[_Passes, int]:
    """Passes with messages numbered by slot, and the number of slots.

    Messages of a stage in one direction are received in the order in which they are sent, so they
    rotate through as many slots as there are messages on the way at once.
    """
    sender, taker = np.flatnonzero(passes.sends), np.flatnonzero(passes.needs)
    if not sender.size:
        return passes, 1
    taken = np.zeros(int(passes.sends.max()) + 1, dtype=np.int64)
    taken[passes.needs[taker]] = passes.depths[taker]
    line = 2 * passes.stages[sender] + (passes.kinds[sender] == FORWARD)
    by_line = np.argsort(line, kind="stable")
    sender, line = sender[by_line], line[by_line]
    message = passes.sends[sender]
    first = np.flatnonzero(np.diff(line, prepend=-1))
    later = line * (int(passes.depths.max()) + 1)
    left = np.maximum.accumulate(later + taken[message])
    under_way = np.arange(1, 1 + len(message)) - np.searchsorted(
        left, later + passes.depths[sender], "right"
    )
    counts = np.maximum.reduceat(under_way, first)
    begins = 1 + np.cumsum(counts) - counts
    of = np.cumsum(np.diff(line, prepend=line[0]) > 0)
    place = np.zeros(len(taken), dtype=np.int64)
    place[message] = begins[of] + (np.arange(len(message)) - first[of]) % counts[of]
    placed = passes._replace(needs=place[passes.needs], sends=place[passes.sends])
    return placed, 1 + int(counts.sum())


def _levels(shape: PipelineShape, passes: _Passes) -> tuple[DependencyLevel, ...]:
    """The passes, level by level."""
    chunks, first = shape.chunks, passes.micros == 0
    forward, stages = passes.kinds == FORWARD, passes.stages
    rows = passes.chunks + chunks * np.where(forward, 0, 2 * passes.kinds - 1 + first)
    begins = np.unique(passes.depths, return_index=True)[1]
    edges = [*begins.tolist(), len(rows)]
    at = np.arange(len(rows)) - np.repeat(begins, np.diff(edges))

    def some(chosen: Bools, *of_each: Ints) -> Iterator[Sequence[tuple[int, ...]]]:
        """The given numbers of some passes, level by level."""
        places = np.flatnonzero(chosen)
        found = list(zip(*(each[places].tolist() for each in of_each), strict=True))
        return (found[low:high] for low, high in pairwise(np.searchsorted(places, edges).tolist()))

    ends = (passes.chunks == 0) | (passes.chunks == chunks - 1)
    last = (passes.kinds == BACKWARD) & (passes.micros == shape.microbatches - 1)
    ended = np.where(last, shape.virtual_stages - passes.chunks // shape.pipeline, 0)
    sending = np.flatnonzero(passes.sends)
    sends, sender_edges = passes.sends[sending], np.searchsorted(sending, edges).tolist()
    return tuple(
        DependencyLevel(
            stages_,
            rows[low:high],
            passes.needs[low:high],
            senders,
            from_,
            sends[begin:end],
            [each for (each,) in loads],
            firsts,
            lasts,
            turns,
        )
        for (low, high), (begin, end), stages_, senders, from_, loads, firsts, lasts, turns in zip(
            pairwise(edges),
            pairwise(sender_edges),
            _spans(stages, edges),
            _spans(at[sending], sender_edges),
            _spans(stages[sending], sender_edges),
            some(forward & ends, at),
            some(forward & first, at, stages, passes.chunks),
            some(last, at, stages, passes.chunks),
            np.maximum.accumulate(np.maximum.reduceat(ended, begins)).tolist(),
            strict=True,
        )
    )


def _spans(places: Ints, edges: list[int]) -> Iterator[slice | Ints]:
    """The indices of each level, as a slice if they are evenly spaced, which avoids a copy."""
    steps = np.diff(places, append=0)
    level = np.repeat(np.arange(len(edges) - 1), np.diff(edges))
    inner = np.diff(level, append=-1) == 0
    uneven = np.zeros(len(edges) - 1, dtype=bool)
    begins = np.array(edges)[level]
    uneven[level[inner & (steps != steps[begins])]] = True
    first, step = places.tolist(), np.where(inner, steps, 1).tolist()
    for (low, high), scattered in zip(pairwise(edges), uneven.tolist(), strict=True):
        if scattered or low == high:
            yield places[low:high]
        else:
            yield slice(first[low], first[high - 1] + 1, step[low])
