"""The walk of many plans of one shape through the levels of their passes, all at once.

A pass of a stage takes what its layers take, so only passes and messages are left of a program: a
pass starts when the one before it on its stage has ended and what it needs has come. Passes of the
same depth in that order wait for none of each other and are added up together, for all plans.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from windlass.cost.arrays import Floats
from windlass.cost.batched.pipeline.dependency_levels import DependencyLevel
from windlass.cost.batched.schedule_index import PipelineShape


@dataclass(frozen=True, slots=True, kw_only=True)
class PassDurations:
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
    """Of each plan: before a forward pass of one of the chain's ends, whether or not what it needs
    has come."""
    message: Floats
    """Of each plan: to send an output, or its gradient, to the next stage."""
    lending: Floats
    """Of each plan: how long the lender's first messages have to wait for weights that it lends."""
    lender: int = 0
    """The stage that lends weights."""
    loan: "TiedGradReturn | None" = None
    """How the gradient of lent weights goes back before the last passes have ended, if any does."""
    stops: bool = False
    """Whether devices wait for some of what they exchange behind the passes of their chunks."""
    in_turn: bool = False
    """Whether a stage that sends or receives does nothing else meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedGradReturn:
    """The gradient of lent weights: handed over in the last backward pass of the last chunk."""

    message: Floats
    """Of each plan: seconds of the message."""
    after: Floats
    """Until it begins, from the begin of that pass."""
    taking: Floats
    """To add it to the owner's, behind the last backward pass of the owner's chunk."""
    owner: int
    """That chunk."""


class ReduceCount(NamedTuple):
    """Reductions that a way through the last passes of a step waits for, but for its last one."""

    chunks: int
    """Of any chunks but the last of the chain."""
    last: bool
    """Whether also of that one, whose layers are not like the others."""


class FirstPassTimes(NamedTuple):
    """Of each chunk's first pass (rows) and each plan (columns), in seconds of a step."""

    begun: Floats
    """When it begins."""
    free: Floats
    """When its stage could begin it."""
    came: Floats
    """When what it needs has come."""


_KINDS = ("forward", "backward", "backward_first", "weight", "weight_first")


@dataclass(slots=True, kw_only=True)
class _State:
    """How far all stages are, in seconds of a step.

    Of three axes the second tells ways apart by what they have waited for; minus infinity where no
    way has waited for so much.
    """

    now: Floats
    """When each stage has ended its last pass."""
    sent: Floats
    """When the last message of each stage has left."""
    came: Floats
    """When the message in each place has come."""
    begun: Floats
    """When the last backward pass of the chain's first chunk, and of its last one, begins."""
    done: Floats
    """When that of each chunk has ended, and where things are done in turn what it hands on has
    left."""
    handed: Floats
    """When the gradient of lent weights has come back, of each way."""
    free: Floats
    """When the stage of each chunk could begin its first pass."""
    met: Floats
    """When what that needs has come."""

    def copy(self) -> "_State":
        """The same, to go on from on its own."""
        return _State(**{each.name: getattr(self, each.name).copy() for each in fields(self)})


class LevelSimulator:
    """A walk through the passes of a step.

    What each reduction takes that a stage waits for is of a plan's sharing, not of its passes. So
    it is not added: a way that waits for one more goes on further behind on its axis.

    Args:
        shape: of all plans.
        durations: of their passes.
        places: of messages.
    """

    def __init__(self, shape: PipelineShape, durations: PassDurations, places: int) -> None:
        self._shape, self._durations = shape, durations
        self._taking = np.concatenate([getattr(durations, name) for name in _KINDS])[:, None]
        waits = durations.stops and shape.virtual_stages > 1
        self.stops = reduce_counts(shape.virtual_stages if waits else 1)
        """What ways can have waited for."""
        plans = len(durations.message)
        firsts = np.zeros((shape.chunks, plans))
        self.state = _State(
            now=np.zeros((shape.pipeline, 1, plans)),
            sent=np.zeros((shape.pipeline, 1, plans)),
            came=np.zeros((places, 1, plans)),
            begun=np.full((2, len(self.stops), plans), -np.inf),
            done=np.full((shape.chunks, len(self.stops), plans), -np.inf),
            handed=np.zeros((1, plans)),
            free=firsts,
            met=firsts.copy(),
        )
        self.state.sent[durations.lender] = durations.lending
        if durations.in_turn:
            self.state.now[durations.lender] = durations.lending

    def over(self, levels: Sequence[DependencyLevel]) -> "_State":
        """How far all stages are behind some more levels."""
        for level in levels:
            if level.turns and len(self.stops) > self.state.now.shape[1]:
                self._branch(level.turns)
            self._pass_by(level)
            for _, stage, chunk in level.lasts:
                self._end_chunk(stage, chunk)
        return self.state

    def _pass_by(self, level: DependencyLevel) -> None:
        """Passes that wait for none of each other."""
        durations, state = self._durations, self.state
        now = state.now[level.stages]
        for at in level.loads:
            now[at] += durations.load
        if durations.in_turn:
            now += np.where(level.needs > 0, 1.0, 0.0)[:, None, None] * durations.message
        came = state.came.take(level.needs, 0)
        for at, _, chunk in level.firsts:
            state.free[chunk], state.met[chunk] = now[at, 0], came[at, 0]
        begin = np.maximum(now, came, out=came)
        np.add(begin, self._taking.take(level.rows, 0), out=now)
        for at, stage, chunk in level.lasts:
            if chunk == 0:
                state.begun[0, : begin.shape[1]] = begin[at]
            if chunk == self._shape.chunks - 1:
                state.begun[1, : begin.shape[1]] = begin[at]
                self._hand_over(stage, begin[at], now[at])
        if not isinstance(level.stages, slice):
            state.now[level.stages] = now
        if level.sends.size:
            self._send(level, now)

    def _send(self, level: DependencyLevel, ended: Floats) -> None:
        """What passes hand on once they have ended."""
        state = self.state
        sent = state.sent[level.from_]
        np.maximum(sent, ended[level.senders], out=sent)
        sent += self._durations.message
        state.came[level.sends] = sent
        if not isinstance(level.from_, slice):
            state.sent[level.from_] = sent
        if self._durations.in_turn:
            state.now[level.from_] = sent

    def _branch(self, turns: int) -> None:
        """Makes room for ways that have waited so often, which none has yet."""
        state = self.state
        more = len(reduce_counts(turns + 1)) - state.now.shape[1]
        if more > 0:
            room = (0, 0), (0, more), (0, 0)
            state.now, state.sent, state.came = (
                np.pad(each, room, constant_values=-np.inf)
                for each in (state.now, state.sent, state.came)
            )

    def _hand_over(self, stage: int, begin: Floats, end: Floats) -> None:
        loan, state = self._durations.loan, self.state
        if loan is None:
            return
        if self._durations.in_turn:
            end += loan.message
            state.handed = begin + loan.after + loan.message
        else:
            state.handed = np.maximum(state.sent[stage], begin + loan.after) + loan.message
            state.sent[stage] = state.handed

    def _end_chunk(self, stage: int, chunk: int) -> None:
        """What a stage does once it has handed on the last gradient of a chunk."""
        loan, now, handed = self._durations.loan, self.state.now[stage], self.state.handed
        if loan is not None and chunk == loan.owner:
            if self._durations.in_turn:
                now += loan.message
            ways = now[: len(handed)]
            np.maximum(ways, handed, out=ways)
            now += loan.taking
        self.state.done[chunk, : len(now)] = now
        if len(self.stops) > 1 and chunk >= self._shape.pipeline:
            further = 1 if chunk == self._shape.chunks - 1 else 2
            now[further:] = now[:-further].copy()
            now[:further] = -np.inf


def reduce_counts(turns: int) -> tuple[ReduceCount, ...]:
    """What ways can have waited for, of stages with so many chunks, by how often at the least.

    A way that waits for one more of the inner chunks is two further behind, one that waits for the
    last chunk of the chain, before any other, is one further behind.
    """
    return tuple(ReduceCount(at // 2, last=at % 2 > 0) for at in range(2 * turns - 1))
