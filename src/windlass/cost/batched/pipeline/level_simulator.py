"""Level simulator: runs many plans of one pipeline shape through their dependency levels at once.

A pass of a stage takes what its layers take, so only passes and messages of a program remain: a
pass starts when the one before it on its stage has ended and its message has arrived. Passes of the
same level do not wait for each other and are added up together, for all plans.
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
    """Seconds of passes, `[chunk, config]`."""

    forward: Floats
    backward: Floats
    """Backward; its input-gradient part if it is split."""
    backward_first: Floats
    """The same for the first micro-batch."""
    weight: Floats
    """Weight-gradient part of a split backward; else zero."""
    weight_first: Floats
    load: Floats
    """Seconds before a forward pass of the first or last chunk, whether or not its message has
    arrived, `[config]`."""
    message: Floats
    """Seconds to send an output, or its gradient, to the next stage, `[config]`."""
    lending: Floats
    """Seconds that the owner's first messages wait for tied weights to be sent, `[config]`."""
    lender: int = 0
    """The stage that owns tied weights."""
    loan: "TiedGradReturn | None" = None
    """How the gradient of tied weights returns before the last passes have ended, if it does."""
    stops: bool = False
    """Whether devices block on some communication after the passes of their chunks."""
    in_turn: bool = False
    """Whether a stage that sends or receives does nothing else meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedGradReturn:
    """Return of the tied weights' gradient in the last chunk's last backward, `[config]`."""

    message: Floats
    """Seconds of the message."""
    after: Floats
    """Seconds until it is sent, from the start of that pass."""
    taking: Floats
    """Seconds to add it to the owner's, after the last backward pass of the owner's chunk."""
    owner: int
    """The owner's chunk."""


class ReduceCount(NamedTuple):
    """Blocking reductions on a path through the last passes of a step, without its last one."""

    chunks: int
    """Reductions of chunks other than the last one."""
    last: bool
    """Whether also that of the last chunk, whose layers differ from the others."""


class FirstPassTimes(NamedTuple):
    """Times of each chunk's first pass, `[chunk, config]`, in seconds of a step."""

    begun: Floats
    """When it starts."""
    free: Floats
    """When its stage could start it."""
    came: Floats
    """When its message arrives."""


_KINDS = ("forward", "backward", "backward_first", "weight", "weight_first")


@dataclass(slots=True, kw_only=True)
class _State:
    """The progress of all stages, in seconds of a step, `[stage or chunk, path, config]`.

    Paths are distinguished by what they have waited for; minus infinity if no path has waited so
    much.
    """

    now: Floats
    """End of each stage's last pass."""
    sent: Floats
    """Time at which each stage's last message has left."""
    came: Floats
    """Arrival of the message in each slot."""
    begun: Floats
    """Start of the last backward pass of the first chunk, and of the last one."""
    done: Floats
    """End of each chunk's last backward pass, or of its message on a bulk-synchronous machine."""
    handed: Floats
    """Arrival of the tied weights' gradient, by path."""
    free: Floats
    """Time at which each chunk's stage could start its first pass."""
    met: Floats
    """Arrival of that pass's message."""

    def copy(self) -> "_State":
        """A copy to go on from separately."""
        return _State(**{each.name: getattr(self, each.name).copy() for each in fields(self)})


class LevelSimulator:
    """Simulates the passes of a step, level by level.

    The time of each blocking reduction depends on a plan's sharding, not on its passes. So it is
        not added:
    a path that waits for one more moves further along its axis.

    Args:
        shape: pipeline shape of all plans.
        durations: durations of their passes.
        places: number of message slots.
    """

    def __init__(self, shape: PipelineShape, durations: PassDurations, places: int) -> None:
        self._shape, self._durations = shape, durations
        self._taking = np.concatenate([getattr(durations, name) for name in _KINDS])[:, None]
        waits = durations.stops and shape.virtual_stages > 1
        self.stops = reduce_counts(shape.virtual_stages if waits else 1)
        """What paths can have waited for."""
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
        """The progress of all stages after some more levels."""
        for level in levels:
            if level.turns and len(self.stops) > self.state.now.shape[1]:
                self._branch(level.turns)
            self._pass_by(level)
            for _, stage, chunk in level.lasts:
                self._end_chunk(stage, chunk)
        return self.state

    def _pass_by(self, level: DependencyLevel) -> None:
        """Runs passes that do not wait for each other."""
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
        """Sends the messages of passes once they have ended."""
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
        """Makes room for paths that have waited more often than any so far."""
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
        """Runs what a stage does once it has sent the last gradient of a chunk."""
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
    """What paths can have waited for on stages with this many chunks, at least, by index.

    A path that waits for one more inner chunk is two indices further; one that waits for the last
    chunk, before any other, is one index further.
    """
    return tuple(ReduceCount(at // 2, last=at % 2 > 0) for at in range(2 * turns - 1))
