"""Turns: the passes of all stages at once, by how many of each kind come before each.

`program.schedule` says in which turn a stage takes its passes, one after the other. Here the same
follows from counts: in every order the forward passes of all chunks of a stage keep one turn, so do
the backward passes, and of both it is known how many of the other come before.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from windlass.schema.plan import PipelineSchedule

_Ints = npt.NDArray[np.int64]

FORWARD, BACKWARD, WEIGHT = 0, 1, 2
"""Kinds of passes; `WEIGHT` is the weights' part of a backward pass that is run in two parts, whose
other part is `BACKWARD`."""


class Before(NamedTuple):
    """How many passes of each kind a stage has taken before another."""

    forward: _Ints
    backward: _Ints
    weight: _Ints


class Passes(NamedTuple):
    """All passes: a row for each stage, a column for each pass in turn."""

    kinds: _Ints
    micros: _Ints
    chunks: _Ints


@dataclass(frozen=True)
class Turns:
    """The turns of one order.

    Args:
        order: any.
        pipeline: stages.
        interleave: chunks of a stage; 1 unless the order interleaves.
        micros: micro-batches of a step; as many as the order allows.
    """

    order: PipelineSchedule
    pipeline: int
    interleave: int
    micros: int

    @property
    def count(self) -> int:
        """Passes of each kind that a stage takes."""
        return self.micros * self.interleave

    @property
    def parted(self) -> bool:
        """Whether backward passes are run in two parts."""
        return self.order == "zero-bubble"

    @cached_property
    def stages(self) -> _Ints:
        """The stages (a column)."""
        return np.arange(self.pipeline)[:, None]

    @cached_property
    def warm(self) -> _Ints:
        """Forward passes of each stage (a column) after which forward and backward take turns."""
        behind = self.pipeline - 1 - self.stages
        if self.order == "gpipe" and self.pipeline > 1:
            return np.full_like(behind, self.count)
        if self.order == "interleaved":
            behind = 2 * behind + (self.interleave - 1) * self.pipeline
        return np.minimum(behind, self.count)

    def before_forward(self, turn: _Ints) -> Before:
        """What comes before some forward passes of each stage (rows)."""
        backward = np.maximum(turn - self.warm, 0)
        return Before(turn, backward, self._weights(backward))

    def before_backward(self, turn: _Ints) -> Before:
        """What comes before some backward passes, or their first parts, of each stage (rows)."""
        forward = np.minimum(turn + self.warm + 1, self.count)
        return Before(forward, turn, self._weights(turn))

    def before_weight(self, turn: _Ints) -> Before:
        """What comes before the second parts of some backward passes of each stage (rows)."""
        follows = turn + self.stages
        """The backward pass whose first part it follows."""
        forward = np.minimum(follows + self.warm + 1, self.count)
        forward = np.where(follows < self.count, forward, self.count)
        return Before(forward, np.minimum(follows + 1, self.count), turn)

    def _weights(self, backward: _Ints) -> _Ints:
        """As many micro-batches later as stages come before this one."""
        late = np.maximum(backward - self.stages, 0)
        return late if self.parted else np.zeros_like(late)

    def through(self, taken: _Ints, chunk: _Ints | int) -> _Ints:
        """Micro-batches that so many forward passes of a stage have brought through a chunk.

        Of backward passes through chunk c it is those of forward passes through `v - 1 - c`.
        """
        cycle = self.pipeline * self.interleave
        whole, rest = np.divmod(taken, cycle)
        within = np.clip(rest - np.asarray(chunk) * self.pipeline, 0, self.pipeline)
        return np.asarray(whole * self.pipeline + within)

    def chunk(self, turn: _Ints) -> _Ints:
        """The chunk of forward passes by their turn."""
        return np.asarray(turn // self.pipeline % self.interleave)

    def micro(self, turn: _Ints) -> _Ints:
        """The micro-batch of passes by their turn among those of their kind."""
        cycle = self.pipeline * self.interleave
        return np.asarray(turn // cycle * self.pipeline + turn % self.pipeline)

    def passes(self) -> Passes:
        """All of them, as `program.schedule.taken` says one by one."""
        turn = np.broadcast_to(np.arange(self.count), (self.pipeline, self.count))
        own, micro = self.chunk(turn), self.micro(turn)
        before = [self.before_forward(turn), self.before_backward(turn)]
        chunks = [own, self.interleave - 1 - own]
        if self.parted:
            before.append(self.before_weight(turn))
            chunks.append(own)
        sides = self.pipeline, len(before) * self.count
        found = Passes(*(np.empty(sides, dtype=np.int64) for _ in Passes._fields))
        for kind, (each, chunk) in enumerate(zip(before, chunks, strict=True)):
            place = each.forward + each.backward + each.weight
            found.kinds[self.stages, place] = kind
            found.micros[self.stages, place] = micro
            found.chunks[self.stages, place] = chunk
        return found
