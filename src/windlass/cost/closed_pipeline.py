"""The clock folded to passes: when the stages of many plans of one order are done, all at once.

A pass of a stage takes what its layers take, so only passes and messages are left of a program: a
pass starts when the one before it on its stage has ended and what it needs has come. Passes of the
same depth in that order wait for none of each other and are added up together, for all plans.

A step of many micro-batches repeats itself: from `Shape.settled` on each takes as long as the last.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from windlass.cost.closed_layers import Floats
from windlass.cost.closed_levels import Level, Shape, levels_of


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
    loan: "LoanBack | None" = None
    """How the gradient of lent weights goes back before the last passes have ended, if any does."""
    stops: bool = False
    """Whether devices wait for some of what they exchange behind the passes of their chunks."""
    in_turn: bool = False
    """Whether a stage that sends or receives does nothing else meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoanBack:
    """The gradient of lent weights: handed over in the last backward pass of the last chunk."""

    message: Floats
    """Of each plan: seconds of the message."""
    after: Floats
    """Until it begins, from the begin of that pass."""
    taking: Floats
    """To add it to the owner's, behind the last backward pass of the owner's chunk."""
    owner: int
    """That chunk."""


class Stops(NamedTuple):
    """Reductions that a way through the last passes of a step waits for, but for its last one."""

    chunks: int
    """Of any chunks but the last of the chain."""
    last: bool
    """Whether also of that one, whose layers are not like the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """Seconds from the begin of a step, apart from what devices wait for behind their passes.

    An array of three: a chunk or stage, how much of that lies on the way (`stops`; minus infinity
    where no way has so much), and a plan. The end is the largest over all ways.
    """

    stops: tuple[Stops, ...]
    begun: Floats
    """When each chunk's last backward pass begins."""
    done: Floats
    """When that has ended, and where things are done in turn what it hands on has left."""
    end: Floats
    """When all passes of a stage have ended."""
    sent: Floats
    """When the last message of a stage has left."""
    first_begun: Floats
    """When each chunk's first pass begins; of each plan (columns), as what follows."""
    first_free: Floats
    """When its stage could begin it."""
    first_came: Floats
    """When what it needs has come."""

    def beyond(self, other: "Folded", times: Floats) -> "Folded":
        """As many times further as from here to `other`."""

        def further(low: Floats, high: Floats) -> Floats:
            with np.errstate(invalid="ignore"):  # of what no way has
                return np.where(np.isneginf(low), low, low + times * (high - low))

        return Folded(
            stops=self.stops,
            begun=further(self.begun, other.begun),
            done=further(self.done, other.done),
            end=further(self.end, other.end),
            sent=further(self.sent, other.sent),
            first_begun=self.first_begun,
            first_free=self.first_free,
            first_came=self.first_came,
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
    walk = _Walk(shape, durations)
    for level in levels_of(shape).all:
        walk.pass_by(level)
    return walk.folded()


class _Walk:
    """How far all stages are.

    What each reduction takes that a stage waits for is of a plan's sharing, not of its passes. So
    it is not added: a way that waits for one more goes on in the next place of the second axis.
    """

    def __init__(self, shape: Shape, durations: Durations) -> None:
        self._shape, self._durations = shape, durations
        plans = durations.message.shape[0]
        taking = np.concatenate([getattr(durations, name) for name in _KINDS])
        loading = np.concatenate([durations.load, np.zeros_like(taking[len(durations.load) :])])
        self._taking, self._loading = taking[:, None], loading[:, None]
        self._stops: tuple[Stops, ...] = (Stops(0, last=False),)
        self._now = np.zeros((shape.pipeline, 1, plans))
        self._sent = np.zeros_like(self._now)
        self._came = np.zeros((levels_of(shape).places, 1, plans))
        self._sent[durations.lender] = durations.lending
        if durations.in_turn:
            self._now[durations.lender] = durations.lending
        if durations.stops and shape.interleave > 1:
            turns = range(shape.interleave)
            self._stops = tuple(
                Stops(count, last=last) for last in (False, True) for count in turns
            )
        self._begun = np.full((shape.chunks, len(self._stops), plans), -np.inf)
        self._done = self._begun.copy()
        self._unbegun = set(range(shape.chunks))
        self._first_free = np.zeros((shape.chunks, plans))
        self._first_came = np.zeros((shape.chunks, plans))
        self._handed = np.zeros((1, plans))
        """When the gradient of lent weights has come back."""

    def pass_by(self, level: Level) -> None:
        """Passes that wait for none of each other."""
        if level.lasts.size and self._now.shape[1] < len(self._stops):
            self._branch()
        now, durations = self._now, self._durations
        begin = now[level.stages] + self._loading[level.rows]
        if durations.in_turn:
            begin += np.where(level.needs > 0, 1.0, 0.0)[:, None, None] * durations.message
        free, begin = begin, np.maximum(begin, self._came[level.needs])
        if self._unbegun:
            self._note_firsts(level, free)
        end = begin + self._taking[level.rows]
        for at, chunk in zip(level.lasts, level.chunks, strict=True):
            self._begun[chunk] = begin[at]
            if chunk == self._shape.chunks - 1:
                self._hand_over(level.stages[at], begin[at], end[at])
        now[level.stages] = end
        if level.senders.size:
            from_ = level.stages[level.senders]
            self._sent[from_] = (
                np.maximum(self._sent[from_], end[level.senders]) + durations.message
            )
            self._came[level.sends] = self._sent[from_]
            if durations.in_turn:
                now[from_] = self._sent[from_]
        for at, chunk in zip(level.lasts, level.chunks, strict=True):
            self._end_chunk(level.stages[at], chunk)

    def _note_firsts(self, level: Level, free: Floats) -> None:
        """Notes of first passes of chunks when each could begin."""
        for at in np.flatnonzero(level.rows < self._shape.chunks):  # rows of forward passes
            chunk = int(level.rows[at])
            if chunk in self._unbegun:
                self._unbegun.remove(chunk)
                self._first_free[chunk] = free[at, 0]
                self._first_came[chunk] = self._came[level.needs[at], 0]

    def _branch(self) -> None:
        """From here on ways differ in what they wait for; none has waited for anything yet."""

        def first(values: Floats) -> Floats:
            more = np.full((len(values), len(self._stops) - 1, values.shape[2]), -np.inf)
            return np.concatenate([values, more], axis=1)

        self._now, self._sent, self._came = map(first, (self._now, self._sent, self._came))

    def _hand_over(self, stage: int, begin: Floats, end: Floats) -> None:
        loan = self._durations.loan
        if loan is None:
            return
        if self._durations.in_turn:
            end += loan.message
            self._handed = begin + loan.after + loan.message
        else:
            left = np.maximum(self._sent[stage], begin + loan.after) + loan.message
            self._sent[stage] = self._handed = left

    def _end_chunk(self, stage: int, chunk: int) -> None:
        """What a stage does once it has handed on the last gradient of a chunk."""
        loan, now = self._durations.loan, self._now
        if loan is not None and chunk == loan.owner:
            meanwhile = loan.message if self._durations.in_turn else 0.0
            now[stage] = np.maximum(now[stage] + meanwhile, self._handed) + loan.taking
        self._done[chunk] = now[stage]
        if len(self._stops) > 1 and chunk >= self._shape.pipeline:
            last = chunk == self._shape.chunks - 1
            moved = np.full_like(now[stage], -np.inf)
            for at, (count, with_last) in enumerate(self._stops):
                before = Stops(count, last=False) if last else Stops(count - 1, last=with_last)
                if (with_last or not last) and before in self._stops:
                    moved[at] = now[stage, self._stops.index(before)]
            now[stage] = moved

    def folded(self) -> Folded:
        """What was found."""
        return Folded(
            stops=self._stops,
            begun=self._begun,
            done=self._done,
            end=self._now,
            sent=self._sent,
            first_begun=np.maximum(self._first_free, self._first_came),
            first_free=self._first_free,
            first_came=self._first_came,
        )
