"""Levels: the passes of all stages by how many others come before them, from their order alone.

Passes of the same depth wait for none of each other, so that the times of all of them are found at
once. A message has a place from when it is sent until it is taken.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from windlass.program.schedule import taken
from windlass.spec.plan import Order

_Ints = npt.NDArray[np.intp]

_FEW_MORE = 5
"""Micro-batches beyond as many as there are stages, from which on steps of plain orders repeat."""


class Shape(NamedTuple):
    """How a step runs through the stages."""

    order: Order
    pipeline: int
    interleave: int
    micros: int
    """Micro-batches of a step; of plans with more than `settled`, that and one, for all."""

    @classmethod
    def of(cls, order: Order, pipeline: int, interleave: int, micros: int) -> "Shape":
        """The shape of plans of so many micro-batches."""
        shape = cls(order, pipeline, interleave, micros)
        return shape._replace(micros=min(micros, shape.settled + pipeline + 1))

    @property
    def settled(self) -> int:
        """Micro-batches from which on each further one takes as long as the last."""
        return 3 * self.pipeline if self.interleave > 1 else self.pipeline + _FEW_MORE

    @property
    def repeats(self) -> bool:
        """Whether it stands for plans of any larger number of micro-batches too."""
        return self.micros > self.settled + self.pipeline

    @property
    def chunks(self) -> int:
        """Parts of the chain: those of all stages."""
        return self.pipeline * self.interleave


class Level(NamedTuple):
    """Passes that wait for none of each other, an element for each."""

    stages: _Ints
    rows: _Ints
    """Of the durations, all kinds of passes below each other."""
    needs: _Ints
    """The place of the message that it needs; 0 for none."""
    senders: _Ints
    """Which of them send a message."""
    sends: _Ints
    """The places of these messages."""
    lasts: _Ints
    """Which of them are the last backward pass of their chunk."""
    chunks: _Ints
    """The chunks of those."""


@dataclass(frozen=True, slots=True)
class Levels:
    """All passes of a step."""

    all: tuple[Level, ...]
    places: int
    """Of messages, that of none among them."""


@lru_cache(maxsize=1024)
def levels_of(shape: Shape) -> Levels:
    """The passes of a shape's stages by how many others come before them."""
    turns = _turns(shape)
    depth = _depths(turns)
    needs, sends, places = _placed(turns, depth)
    by_depth = np.argsort(depth, kind="stable")
    depth = depth[by_depth]
    edges = np.searchsorted(depth, np.arange(depth[-1] + 2)).tolist()
    stages, rows, needs, sends, lasts = (
        each[by_depth] for each in (turns.stages, turns.rows, needs, sends, turns.lasts)
    )
    within = np.arange(len(depth)) - np.array(edges)[depth]
    sending, ending = np.flatnonzero(sends), np.flatnonzero(lasts >= 0)
    sender_edges = np.searchsorted(sending, edges).tolist()
    end_edges = np.searchsorted(ending, edges).tolist()
    senders, sends = within[sending], sends[sending]
    enders, chunks = within[ending], lasts[ending]
    return Levels(
        tuple(
            Level(
                stages[low:high],
                rows[low:high],
                needs[low:high],
                senders[first:last],
                sends[first:last],
                enders[begin:end],
                chunks[begin:end],
            )
            for (low, high), (first, last), (begin, end) in zip(
                pairwise(edges), pairwise(sender_edges), pairwise(end_edges), strict=True
            )
        ),
        places,
    )


class _Turns(NamedTuple):
    """The passes of all stages, one stage behind the other, an element for each."""

    stages: _Ints
    rows: _Ints
    needs: _Ints
    """The message that it needs, an output of the chunk before or its own one's gradient; or 0."""
    sends: _Ints
    """The message that it sends, or 0. Those of a chunk follow each other."""
    lasts: _Ints
    """The chunk whose last backward pass it is; -1 of any other."""
    chunks_sent: _Ints
    """A number for the chunk whose outputs, or the gradients of whose inputs, it sends."""


_CODES = {"forward": 0, "backward": 1, "backward input": 1, "backward weight": 2}


def _turns(shape: Shape) -> _Turns:
    order, pipeline, chunks, micros = shape.order, shape.pipeline, shape.chunks, shape.micros
    kinds, micro, part = list[int](), list[int](), list[int]()
    for stage in range(pipeline):  # one after the other, since so many tuples at once are slow
        turns = taken(order, pipeline, stage, micros, chunks=shape.interleave)
        kinds += [_CODES[turn[0]] for turn in turns]
        micro += [turn[1] for turn in turns]
        part += [turn[2] for turn in turns]
    kind, micro_ = np.array(kinds), np.array(micro)
    stages = np.repeat(np.arange(pipeline), len(kinds) // pipeline)
    chunk = np.array(part) * pipeline + stages
    forward, backward = kind == 0, kind == 1
    output, gradient = 1 + chunk * micros + micro_, 1 + (chunks + chunk) * micros + micro_
    ahead, behind = chunk < chunks - 1, chunk > 0
    return _Turns(
        stages=stages,
        rows=chunk + chunks * np.where(forward, 0, 2 * kind - 1 + (micro_ == 0)),
        needs=np.where(forward & behind, output - micros, np.where(backward & ahead, gradient, 0)),
        sends=np.where(forward & ahead, output, np.where(backward & behind, gradient - micros, 0)),
        lasts=np.where(backward & (micro_ == micros - 1), chunk, -1),
        chunks_sent=np.where(backward, chunks + chunk, chunk),
    )


def _depths(turns: _Turns) -> _Ints:
    """How many passes come before each, one after the other."""
    needs, sends = turns.needs.tolist(), turns.sends.tolist()
    sent = [-1] * (max(sends) + 1)
    sent[0] = 0
    ends = [*np.flatnonzero(np.diff(turns.stages, prepend=-1)).tolist(), len(needs)]
    at, depths = ends[:-1], [0] * len(needs)
    reached = [0] * len(at)
    while at != ends[1:]:
        before = at[:]
        for stage, end in enumerate(ends[1:]):
            place, now = at[stage], reached[stage]
            while place < end and (came := sent[needs[place]]) >= 0:
                now = max(now, came) + 1
                depths[place] = now
                if sends[place]:
                    sent[sends[place]] = now
                place += 1
            at[stage], reached[stage] = place, now
        if at == before:
            raise ValueError("stages wait for each other")
    return np.array(depths) - 1


def _placed(turns: _Turns, depth: _Ints) -> tuple[_Ints, _Ints, int]:
    """Needs and sends with messages numbered by their places, and how many places there are.

    The messages of a chunk take turns in as many places as are under way at once.
    """
    sender, taker = np.flatnonzero(turns.sends), np.flatnonzero(turns.needs)
    if not sender.size:
        return turns.needs, turns.sends, 1
    sender = sender[np.argsort(turns.sends[sender])]
    taker = taker[np.argsort(turns.needs[taker])]
    message, chunk = turns.sends[sender], turns.chunks_sent[sender]
    first = np.flatnonzero(np.diff(chunk, prepend=-1))
    later = chunk * (int(depth.max()) + 1)
    taken_ = np.maximum.accumulate(later + depth[taker])
    under_way = np.arange(1, 1 + len(message)) - np.searchsorted(
        taken_, later + depth[sender], "right"
    )
    counts = np.maximum.reduceat(under_way, first)
    begins = 1 + np.cumsum(counts) - counts
    of = np.cumsum(np.diff(chunk, prepend=chunk[0]) > 0)
    place = np.zeros(int(message.max()) + 1, dtype=np.intp)
    place[message] = begins[of] + (np.arange(len(message)) - first[of]) % counts[of]
    return place[turns.needs], place[turns.sends], 1 + int(counts.sum())
