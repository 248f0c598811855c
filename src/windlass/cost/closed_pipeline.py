"""The clock folded to passes: when the stages of many plans of one order are done, all at once.

A pass of a stage takes what its layers take, so only passes and messages are left of a program: a
pass starts when the one before it on its stage has ended and what it needs has come. Passes of the
same depth in that order wait for none of each other and are added up together, for all plans.

A step of many micro-batches repeats itself: from `_settled` on each takes as long as the last.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from windlass.cost.closed_layers import Floats
from windlass.program.schedule import Pass, taken
from windlass.spec.plan import Order

_Ints = npt.NDArray[np.intp]


class Shape(NamedTuple):
    """How a step runs through the stages."""

    order: Order
    pipeline: int
    interleave: int
    micros: int

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

    def beyond(self, other: "Folded", times: float) -> "Folded":
        """As many times further as from here to `other`."""
        return Folded(
            ready=self.ready + times * (other.ready - self.ready),
            end=self.end + times * (other.end - self.end),
        )


def fold(shape: Shape, durations: Durations) -> Folded:
    """When the stages are done with all passes of a step, gradients not yet reduced.

    Args:
        shape: of all plans.
        durations: a row for each chunk in the order of the chain.
    """
    settled = _settled(shape)
    if shape.micros <= settled + shape.pipeline:
        return _walk(shape, durations)
    short, long = (
        _walk(shape._replace(micros=micros), durations)
        for micros in (settled, settled + shape.pipeline)
    )
    return short.beyond(long, (shape.micros - settled) / shape.pipeline)


def _settled(shape: Shape) -> int:
    """Micro-batches after which each further one takes as long as the last."""
    return shape.pipeline * (3 if shape.interleave > 1 else 2)


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
    sent, ready = np.zeros_like(now), np.zeros((shape.chunks, plans))
    sent[durations.lender] = durations.lending
    came = np.zeros((1 + 2 * shape.chunks * shape.micros, plans))
    for stages, rows, needs, senders, sends, lasts, chunks in _levels(shape):
        if lasts.size:
            ready[chunks] = now[stages[lasts]]
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
    return Folded(ready=ready, end=now)


@lru_cache(maxsize=512)
def _levels(shape: Shape) -> tuple[_Level, ...]:
    """The passes of all stages by how many others come before them."""
    lists = [
        taken(shape.order, shape.pipeline, stage, shape.micros, chunks=shape.interleave)
        for stage in range(shape.pipeline)
    ]
    at = [0] * shape.pipeline
    there: set[int] = {0}
    found: list[_Level] = []
    while any(done < len(turns) for done, turns in zip(at, lists, strict=True)):
        able = [
            stage
            for stage, turns in enumerate(lists)
            if at[stage] < len(turns) and _needs(shape, stage, turns[at[stage]]) in there
        ]
        passes = [(stage, lists[stage][at[stage]]) for stage in able]
        sends = [_sends(shape, stage, each) for stage, each in passes]
        lasts = [n for n, (_, each) in enumerate(passes) if _ends(shape, each)]
        found.append(
            _Level(
                stages=np.array(able, dtype=np.intp),
                rows=np.array([_row(shape, *each) for each in passes], dtype=np.intp),
                needs=np.array([_needs(shape, *each) for each in passes], dtype=np.intp),
                senders=np.array([n for n, sent in enumerate(sends) if sent], dtype=np.intp),
                sends=np.array([sent for sent in sends if sent], dtype=np.intp),
                lasts=np.array(lasts, dtype=np.intp),
                chunks=np.array([_chunk(shape, *passes[n]) for n in lasts], dtype=np.intp),
            )
        )
        there.update(sends)
        for stage in able:
            at[stage] += 1
    return tuple(found)


def _ends(shape: Shape, each: Pass) -> bool:
    """Whether it is the last backward pass of a chunk of layers."""
    return each.micro == shape.micros - 1 and each.kind in ("backward", "backward input")


def _chunk(shape: Shape, stage: int, each: Pass) -> int:
    return each.chunk * shape.pipeline + stage


def _row(shape: Shape, stage: int, each: Pass) -> int:
    chunk = _chunk(shape, stage, each)
    if each.kind == "forward":
        return chunk
    kind = 3 if each.kind == "backward weight" else 1
    return (kind + (each.micro == 0)) * shape.chunks + chunk


def _needs(shape: Shape, stage: int, each: Pass) -> int:
    """The message that a pass needs: an output of the chunk before, or its own one's gradient."""
    chunk = _chunk(shape, stage, each)
    if each.kind == "forward":
        return 1 + (chunk - 1) * shape.micros + each.micro if chunk else 0
    if each.kind == "backward weight" or chunk == shape.chunks - 1:
        return 0
    return 1 + (shape.chunks + chunk) * shape.micros + each.micro


def _sends(shape: Shape, stage: int, each: Pass) -> int:
    chunk = _chunk(shape, stage, each)
    if each.kind == "forward":
        return 1 + chunk * shape.micros + each.micro if chunk < shape.chunks - 1 else 0
    if each.kind == "backward weight" or chunk == 0:
        return 0
    return 1 + (shape.chunks + chunk - 1) * shape.micros + each.micro
