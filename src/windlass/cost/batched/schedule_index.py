"""Turns: the passes of all stages at once, by how many of each kind come before each.

`program.schedule` says in which turn a stage takes its passes, one after the other. Here the same
follows from counts: in every order the forward passes of all chunks of a stage keep one turn, so do
the backward passes, and of both it is known how many of the other come before.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from windlass.cost.arrays import Ints
from windlass.schema.plan import PipelineSchedule

FORWARD, BACKWARD, WEIGHT = 0, 1, 2
"""Kinds of passes; `WEIGHT` is the weights' part of a backward pass that is run in two parts, whose
other part is `BACKWARD`."""


class PassesBefore(NamedTuple):
    """How many passes of each kind a stage has taken before another."""

    forward: Ints
    backward: Ints
    weight: Ints


class SchedulePasses(NamedTuple):
    """All passes: a row for each stage, a column for each pass in turn."""

    kinds: Ints
    micros: Ints
    chunks: Ints


@dataclass(frozen=True)
class ScheduleIndex:
    """The turns of one order.

    Args:
        order: any.
        pipeline: stages.
        interleave: chunks of a stage; 1 unless the order interleaves.
        micros: micro-batches of a step; as many as the order allows.
    """

    schedule: PipelineSchedule
    pipeline: int
    virtual_stages: int
    microbatches: int

    @property
    def count(self) -> int:
        """Passes of each kind that a stage takes."""
        return self.microbatches * self.virtual_stages

    @property
    def parted(self) -> bool:
        """Whether backward passes are run in two parts."""
        return self.schedule == "zero-bubble"

    @cached_property
    def stages(self) -> Ints:
        """The stages (a column)."""
        return np.arange(self.pipeline)[:, None]

    @cached_property
    def warm(self) -> Ints:
        """Forward passes of each stage (a column) after which forward and backward take turns."""
        behind = self.pipeline - 1 - self.stages
        if self.schedule == "gpipe" and self.pipeline > 1:
            return np.full_like(behind, self.count)
        if self.schedule == "interleaved":
            behind = 2 * behind + (self.virtual_stages - 1) * self.pipeline
        return np.minimum(behind, self.count)

    def before_forward(self, turn: Ints) -> PassesBefore:
        """What comes before some forward passes of each stage (rows)."""
        backward = np.maximum(turn - self.warm, 0)
        return PassesBefore(turn, backward, self._weights(backward))

    def before_backward(self, turn: Ints) -> PassesBefore:
        """What comes before some backward passes, or their first parts, of each stage (rows)."""
        forward = np.minimum(turn + self.warm + 1, self.count)
        return PassesBefore(forward, turn, self._weights(turn))

    def before_weight(self, turn: Ints) -> PassesBefore:
        """What comes before the second parts of some backward passes of each stage (rows)."""
        follows = turn + self.stages
        """The backward pass whose first part it follows."""
        forward = np.minimum(follows + self.warm + 1, self.count)
        forward = np.where(follows < self.count, forward, self.count)
        return PassesBefore(forward, np.minimum(follows + 1, self.count), turn)

    def _weights(self, backward: Ints) -> Ints:
        """As many micro-batches later as stages come before this one."""
        late = np.maximum(backward - self.stages, 0)
        return late if self.parted else np.zeros_like(late)

    def through(self, taken: Ints, chunk: Ints | int) -> Ints:
        """Micro-batches that so many forward passes of a stage have brought through a chunk.

        Of backward passes through chunk c it is those of forward passes through `v - 1 - c`.
        """
        cycle = self.pipeline * self.virtual_stages
        whole, rest = np.divmod(taken, cycle)
        within = np.clip(rest - np.asarray(chunk) * self.pipeline, 0, self.pipeline)
        return np.asarray(whole * self.pipeline + within)

    def chunk(self, turn: Ints) -> Ints:
        """The chunk of forward passes by their turn."""
        return np.asarray(turn // self.pipeline % self.virtual_stages)

    def micro(self, turn: Ints) -> Ints:
        """The micro-batch of passes by their turn among those of their kind."""
        cycle = self.pipeline * self.virtual_stages
        return np.asarray(turn // cycle * self.pipeline + turn % self.pipeline)

    def passes(self) -> SchedulePasses:
        """All of them, as `program.schedule.taken` says one by one."""
        turn = np.broadcast_to(np.arange(self.count), (self.pipeline, self.count))
        own, micro = self.chunk(turn), self.micro(turn)
        before = [self.before_forward(turn), self.before_backward(turn)]
        chunks = [own, self.virtual_stages - 1 - own]
        if self.parted:
            before.append(self.before_weight(turn))
            chunks.append(own)
        sides = self.pipeline, len(before) * self.count
        found = SchedulePasses(*(np.empty(sides, dtype=np.int64) for _ in SchedulePasses._fields))
        for kind, (each, chunk) in enumerate(zip(before, chunks, strict=True)):
            place = each.forward + each.backward + each.weight
            found.kinds[self.stages, place] = kind
            found.micros[self.stages, place] = micro
            found.chunks[self.stages, place] = chunk
        return found


_FEW_MORE = 5
"""Micro-batches beyond as many as there are stages, from which on steps of plain orders repeat."""


class PipelineShape(NamedTuple):
    """How a step runs through the stages."""

    schedule: PipelineSchedule
    pipeline: int
    virtual_stages: int
    microbatches: int
    """Micro-batches of a step; of plans with more than `settled`, that and one, for all."""

    @classmethod
    def of(
        cls, order: PipelineSchedule, pipeline: int, interleave: int, micros: int
    ) -> "PipelineShape":
        """The shape of plans of so many micro-batches."""
        shape = cls(order, pipeline, interleave, micros)
        return shape._replace(microbatches=min(micros, shape.settled + pipeline + 1))

    @property
    def settled(self) -> int:
        """Micro-batches from which on each further one takes as long as the last."""
        return 3 * self.pipeline if self.virtual_stages > 1 else self.pipeline + _FEW_MORE

    @property
    def repeats(self) -> bool:
        """Whether it stands for plans of any larger number of micro-batches too."""
        return self.microbatches > self.settled + self.pipeline

    @property
    def chunks(self) -> int:
        """Parts of the chain: those of all stages."""
        return self.pipeline * self.virtual_stages
