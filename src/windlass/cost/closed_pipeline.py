"""The clock folded to passes: when the stages of many plans of one order are done, all at once.

A pass of a stage takes what its layers take, so only passes and messages are left of a program: a
pass starts when the one before it on its stage has ended and what it needs has come. Passes of the
same depth in that order wait for none of each other and are added up together, for all plans.

A step of many micro-batches repeats itself: from `Shape.settled` on each takes as long as the last.
"""

from dataclasses import dataclass

import numpy as np

from windlass.cost.closed_layers import Floats
from windlass.cost.closed_levels import Shape, levels_of


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


_KINDS = ("forward", "backward", "backward_first", "weight", "weight_first")


def _walk(shape: Shape, durations: Durations) -> Folded:
    plans, levels = durations.message.shape[0], levels_of(shape)
    taking = np.concatenate([getattr(durations, name) for name in _KINDS])
    loading = np.concatenate([durations.load, np.zeros_like(taking[durations.load.shape[0] :])])
    now = np.zeros((shape.pipeline, plans))
    sent, before = np.zeros_like(now), np.zeros((shape.chunks, plans))
    sent[durations.lender] = durations.lending
    came = np.zeros((levels.places, plans))
    for stages, rows, needs, senders, sends, lasts, chunks in levels.all:
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
