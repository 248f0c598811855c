"""Schedule index: the passes of all stages at once, by how many of each kind come before each.

`program.pipeline_schedules` lists a stage's passes one after the other. Here the same follows from
    counts:
under every schedule the forward passes of all chunks of a stage keep one order, so do the backward
    passes,
and of both it is known how many of the other come before.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from windlass.cost.arrays import Ints
from windlass.cost.clock.plan_columns import PipelineShape as PipelineShape
from windlass.schema import PipelineSchedule

FORWARD, BACKWARD, WEIGHT = 0, 1, 2
"""Kinds of passes; `WEIGHT` is the weights' part of a backward pass that is run in two parts, whose
other part is `BACKWARD`."""


class PassesBefore(NamedTuple):
    """Passes of each kind that a stage has run before another."""

    forward: Ints
    backward: Ints
    weight: Ints


class SchedulePasses(NamedTuple):
    """All passes, `[stage, turn]`."""

    kinds: Ints
    micros: Ints
    chunks: Ints


@dataclass(frozen=True)
class ScheduleIndex:
    """The order of passes under one schedule.

    Args:
        schedule: any schedule.
        pipeline: pipeline stages.
        virtual_stages: model chunks of a stage; 1 unless the schedule is interleaved.
        microbatches: micro-batches of a step, as the schedule allows.
    """

    schedule: PipelineSchedule
    pipeline: int
    virtual_stages: int
    microbatches: int

    @property
    def count(self) -> int:
        """Passes of each kind that a stage runs."""
        return self.microbatches * self.virtual_stages

    @property
    def parted(self) -> bool:
        """Whether the backward is split into input and weight gradients."""
        return self.schedule == "zero-bubble"

    @cached_property
    def stages(self) -> Ints:
        """The stages, `[stage, 1]`."""
        return np.arange(self.pipeline)[:, None]

    @cached_property
    def warm(self) -> Ints:
        """Forward passes after which forward and backward alternate, `[stage, 1]`."""
        behind = self.pipeline - 1 - self.stages
        if self.schedule == "gpipe" and self.pipeline > 1:
            return np.full_like(behind, self.count)
        if self.schedule == "interleaved":
            behind = 2 * behind + (self.virtual_stages - 1) * self.pipeline
        return np.minimum(behind, self.count)

    def before_forward(self, turn: Ints) -> PassesBefore:
        """Passes before some forward passes, `[stage, turn]`."""
        backward = np.maximum(turn - self.warm, 0)
        return PassesBefore(turn, backward, self._weights(backward))

    def before_backward(self, turn: Ints) -> PassesBefore:
        """Passes before some backward passes, or their input-gradient parts, `[stage, turn]`."""
        forward = np.minimum(turn + self.warm + 1, self.count)
        return PassesBefore(forward, turn, self._weights(turn))

    def before_weight(self, turn: Ints) -> PassesBefore:
        """Passes before some weight-gradient passes, `[stage, turn]`."""
        follows = turn + self.stages
        """The backward pass whose first part it follows."""
        forward = np.minimum(follows + self.warm + 1, self.count)
        forward = np.where(follows < self.count, forward, self.count)
        return PassesBefore(forward, np.minimum(follows + 1, self.count), turn)

    def _weights(self, backward: Ints) -> Ints:
        """Weight-gradient passes, which lag by one micro-batch for each earlier stage."""
        late = np.maximum(backward - self.stages, 0)
        return late if self.parted else np.zeros_like(late)

    def through(self, taken: Ints, chunk: Ints | int) -> Ints:
        """Micro-batches that a number of forward passes of a stage have brought through a chunk.

        Backward passes through chunk c count like forward passes through `v - 1 - c`.
        """
        cycle = self.pipeline * self.virtual_stages
        whole, rest = np.divmod(taken, cycle)
        within = np.clip(rest - np.asarray(chunk) * self.pipeline, 0, self.pipeline)
        return np.asarray(whole * self.pipeline + within)

    def chunk(self, turn: Ints) -> Ints:
        """The chunk of forward passes, by their turn."""
        return np.asarray(turn // self.pipeline % self.virtual_stages)

    def micro(self, turn: Ints) -> Ints:
        """The micro-batch of passes, by their turn among those of their kind."""
        cycle = self.pipeline * self.virtual_stages
        return np.asarray(turn // cycle * self.pipeline + turn % self.pipeline)

    def passes(self) -> SchedulePasses:
        """All passes, in the order of `program.pipeline_schedules`."""
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
