"""The clock folded to passes: when the stages of many plans of one order are done, all at once.

A pass of a stage takes what its layers take, so only passes and messages are left of a program: a
pass starts when the one before it on its stage has ended and what it needs has come. Passes of the
same depth in that order wait for none of each other and are added up together, for all plans.

A step of many micro-batches repeats itself: from `Shape.settled` on each takes as long as the last.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from windlass.cost.closed_layers import Floats
from windlass.program.schedule import taken
from windlass.spec.plan import Order

_Ints = npt.NDArray[np.intp]

_FEW_MORE = 3
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Seconds of the passes of each chunk of layers (rows) of many plans (columns)."""

    forward: Floats
    backward: Floats
    """Of a zero-bubble order, the input's part."""
    backward_first: Floats
    """Of the first micro-batch."""
    weight: Floats
    """Of a zero-bubble order, the weights' part; else nothing."""
    weight_first: Floats
    load: Floats
    """Before a forward pass, whether or not what it needs has come."""
    message: Floats
    """Of each plan: to send an output, or its gradient, to the next stage."""
    lending: Floats
    """Of each plan: how long the lender's first messages have to wait for weights that it lends."""
    lender: int = 0
    """The stage that lends weights."""
    in_turn: bool = False
    """Whether a stage that sends or receives does nothing else meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """Seconds from the begin of a step, of many plans (columns)."""

    ready: Floats
    """When the pass before a chunk's last backward pass has ended on its stage; a row for each."""
    end: Floats
    """When all passes of a stage have ended; a row for each."""

    def beyond(self, other: "Folded", times: Floats) -> "Folded":
        """As many times further as from here to `other`."""
        return Folded(
            ready=self.ready + times * (other.ready - self.ready),
            end=self.end + times * (other.end - self.end),
        )


def fold(shape: Shape, durations: Durations, micros: Floats) -> Folded:
    """When the stages are done with all passes of a step, gradients not yet reduced.

    Args:
        shape: of all plans.
        durations: a row for each chunk in the order of the chain.
        micros: micro-batches of each plan.
    """
    if not shape.repeats:
        return _walk(shape, durations)
    settled = shape.settled
    short, long = (
        _walk(shape._replace(micros=count), durations)
        for count in (settled, settled + shape.pipeline)
    )
    return short.beyond(long, (micros - settled) / shape.pipeline)


class _Level(NamedTuple):
    """Passes that wait for none of each other, an element for each."""

    stages: _Ints
    rows: _Ints
    """Of the durations, all kinds of passes below each other."""
    needs: _Ints
    """The message that it needs; 0 for none."""
    senders: _Ints
    """Which of them send a message."""
    sends: _Ints
    lasts: _Ints
    """Which of them are the last backward pass of their chunk."""
    chunks: _Ints
    """The chunks of those."""


_KINDS = ("forward", "backward", "backward_first", "weight", "weight_first")


def _walk(shape: Shape, durations: Durations) -> Folded:
    plans = durations.message.shape[0]
    taking = np.concatenate([getattr(durations, name) for name in _KINDS])
    loading = np.concatenate([durations.load, np.zeros_like(taking[durations.load.shape[0] :])])
    now = np.zeros((shape.pipeline, plans))
    sent, before = np.zeros_like(now), np.zeros((shape.chunks, plans))
    sent[durations.lender] = durations.lending
    came = np.zeros((1 + 2 * shape.chunks * shape.micros, plans))
    for stages, rows, needs, senders, sends, lasts, chunks in _levels(shape):
        if lasts.size:
            before[chunks] = now[stages[lasts]]
        begin = now[stages] + loading[rows]
        if durations.in_turn:
            begin += np.where(needs > 0, 1.0, 0.0)[:, None] * durations.message
        end = np.maximum(begin, came[needs]) + taking[rows]
        now[stages] = end
        if senders.size:
            from_ = stages[senders]
            sent[from_] = np.maximum(sent[from_], end[senders]) + durations.message
            came[sends] = sent[from_]
            if durations.in_turn:
                now[from_] = sent[from_]
    return Folded(ready=before, end=now)


class _Turn(NamedTuple):
    """One pass of a stage, as places in tables."""

    row: int
    need: int
    """The message that it needs: an output of the chunk before, or its own one's gradient."""
    sends: int
    """The message that it sends; 0 for none."""
    last: int
    """The chunk whose last backward pass it is; -1 of any other."""


@lru_cache(maxsize=1024)
def _levels(shape: Shape) -> tuple[_Level, ...]:
    """The passes of all stages by how many others come before them."""
    lists = [_turns(shape, stage) for stage in range(shape.pipeline)]
    at = [0] * shape.pipeline
    there = bytearray(1 + 2 * shape.chunks * shape.micros)
    there[0] = 1
    found: list[_Level] = []
    going = list(range(shape.pipeline))
    while going:
        able = [stage for stage in going if there[lists[stage][at[stage]].need]]
        turns = [lists[stage][at[stage]] for stage in able]
        found.append(_level(able, turns))
        for stage, turn in zip(able, turns, strict=True):
            there[turn.sends] = 1
            at[stage] += 1
        going = [stage for stage in going if at[stage] < len(lists[stage])]
    return tuple(found)


def _level(stages: list[int], turns: list[_Turn]) -> _Level:
    rows, needs, sends, lasts = zip(*turns, strict=True)
    senders = [at for at, sent in enumerate(sends) if sent]
    ending = [at for at, chunk in enumerate(lasts) if chunk >= 0]
    return _Level(
        stages=np.array(stages),
        rows=np.array(rows),
        needs=np.array(needs),
        senders=np.array(senders, dtype=np.intp),
        sends=np.array([sends[at] for at in senders], dtype=np.intp),
        lasts=np.array(ending, dtype=np.intp),
        chunks=np.array([lasts[at] for at in ending], dtype=np.intp),
    )


def _turns(shape: Shape, stage: int) -> list[_Turn]:
    order, pipeline, chunks, micros = shape.order, shape.pipeline, shape.chunks, shape.micros
    found = []
    for kind, micro, part in taken(order, pipeline, stage, micros, chunks=shape.interleave):
        chunk = part * pipeline + stage
        if kind == "forward":
            need = 1 + (chunk - 1) * micros + micro if chunk else 0
            sends = 1 + chunk * micros + micro if chunk < chunks - 1 else 0
            found.append(_Turn(chunk, need, sends, -1))
        elif kind == "backward weight":
            found.append(_Turn((3 + (micro == 0)) * chunks + chunk, 0, 0, -1))
        else:
            need = 1 + (chunks + chunk) * micros + micro if chunk < chunks - 1 else 0
            sends = 1 + (chunks + chunk - 1) * micros + micro if chunk else 0
            last = chunk if micro == micros - 1 else -1
            found.append(_Turn((1 + (micro == 0)) * chunks + chunk, need, sends, last))
    return found
