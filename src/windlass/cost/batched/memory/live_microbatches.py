"""Live micro-batches: the passes at which a stage may be fullest, and what it holds then.

A micro-batch is live in a chunk from its forward pass to the end of its backward. Between the turns
at which a stage goes on to another chunk, or starts or stops to alternate passes, what it holds
grows or shrinks evenly with each pass. So the passes at both ends of such stretches stand for all,
and those beside them where a chunk's first or last backward differs from the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache

import numpy as np

from windlass.cost.arrays import Ints
from windlass.cost.batched.memory.pareto import pareto_rows
from windlass.cost.batched.schedule_index import (
    BACKWARD,
    FORWARD,
    WEIGHT,
    PassesBefore,
    PipelineShape,
    ScheduleIndex,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMoments:
    """Passes at which a stage may be fullest, `[pass]` or `[pass, chunk]`."""

    stage: Ints
    kind: Ints
    """Kind of the pass, as `schedule_index` numbers them."""
    chunk: Ints
    """The chunk at work, counted within the stage."""
    first: Ints
    """1 if it is its chunk's first pass that creates gradients."""
    last: Ints
    """1 if it is its chunk's last pass that adds to gradients."""
    open: Ints
    """Other micro-batches whose backward has not begun."""
    growth: Ints
    """How many more of them with each micro-batch beyond the settled ones."""
    waiting: Ints
    """Other micro-batches that wait for their weight-gradient pass."""
    made: Ints
    """1 if all gradients of the chunk exist."""
    over: Ints
    """1 if the chunk has run all its passes."""
    begun: Ints
    """1 if the chunk has run its first forward pass, or runs it now."""

    def only(self, chosen: Sequence[int]) -> "PeakMoments":
        """Some of the passes."""
        return PeakMoments(**{each.name: getattr(self, each.name)[chosen] for each in fields(self)})


@lru_cache(maxsize=512)
def peak_moments(shape: PipelineShape, alike: tuple[int, ...]) -> PeakMoments:
    """The passes at which stages may be fullest.

    Args:
        shape: pipeline shape, which may stand for any number of micro-batches.
        alike: a number for each stage; stages that share it are represented by their fullest
            passes.
    """
    micros = shape.settled if shape.repeats else shape.microbatches
    found = _moments(ScheduleIndex(shape.schedule, shape.pipeline, shape.virtual_stages, micros))
    if shape.repeats and shape.schedule == "gpipe":
        further = ScheduleIndex(
            shape.schedule, shape.pipeline, shape.virtual_stages, micros + shape.pipeline
        )
        growth = (_moments(further).open - found.open) // shape.pipeline
        found = replace(found, growth=growth)
    keys = np.array(alike)[found.stage]
    for own in (found.chunk, found.kind, found.first, found.last):
        keys = keys * (1 + int(own.max())) + own
    # A waiting micro-batch holds no less than an open one, and a finished chunk no more.
    held = found.open + found.waiting
    counts = (held, found.growth, found.waiting, found.made, -found.over, found.begun)
    return found.only(pareto_rows(np.concatenate(counts, axis=1), keys))


def _moments(turns: ScheduleIndex) -> PeakMoments:
    parts = [
        _part(turns, FORWARD, _forward_edges(turns)),
        _part(turns, BACKWARD, _backward_edges(turns)),
    ]
    if turns.parted:
        parts.append(_part(turns, WEIGHT, _weight_edges(turns)))
    return PeakMoments(
        **{
            each.name: np.concatenate([getattr(part, each.name) for part in parts])
            for each in fields(PeakMoments)
        }
    )


def _part(turns: ScheduleIndex, kind: int, turn: Ints) -> PeakMoments:
    """What each stage holds at some passes of one kind, given by their turns, `[stage, turn]`."""
    count = {
        FORWARD: turns.before_forward, BACKWARD: turns.before_backward, WEIGHT: turns.before_weight
    }[kind](turn)  # fmt: skip
    stage = np.broadcast_to(turns.stages, turn.shape).ravel()
    before, turn, chunks = (
        PassesBefore(*map(np.ravel, count)),
        turn.ravel(),
        np.arange(turns.virtual_stages),
    )
    chunk, micro = turns.chunk(turn), turns.micro(turn)
    if kind == BACKWARD:
        chunk = turns.virtual_stages - 1 - chunk
    at_work = (chunk[:, None] == chunks).astype(np.int64)
    came = turns.through(before.forward[:, None], chunks)
    left = turns.through(before.backward[:, None], chunks[::-1])
    done = before.weight[:, None] if turns.parted else left
    adds = int(kind == (WEIGHT if turns.parted else BACKWARD))
    return PeakMoments(
        stage=stage,
        kind=np.full_like(turn, kind),
        chunk=chunk,
        first=adds * (micro == 0),
        last=adds * (micro == turns.microbatches - 1),
        open=came - left - at_work * (kind == BACKWARD),
        growth=np.zeros_like(came),
        waiting=left - done - at_work * (kind == WEIGHT),
        made=np.minimum(done, 1),
        over=done // turns.microbatches,
        begun=np.minimum(came + at_work, 1),
    )


def _edges(turns: ScheduleIndex, *edges: Ints) -> Ints:
    """Turns within range, `[stage, turn]`."""
    sides = turns.pipeline
    rows = [np.broadcast_to(edge, (sides, edge.shape[-1])) for edge in edges]
    return np.clip(np.concatenate(rows, axis=1), 0, turns.count - 1)


def _changes(turns: ScheduleIndex) -> Ints:
    """Turns at which a stage goes on to another chunk."""
    return np.arange(
        0, turns.count + 1, turns.pipeline if turns.virtual_stages > 1 else turns.count
    )


def _forward_edges(turns: ScheduleIndex) -> Ints:
    change, warm, stages = _changes(turns), turns.warm, turns.stages
    both = warm + change
    """Backward passes go on to another chunk."""
    edges = [change - 1, change, both - 1, both, both + 1]
    return _edges(turns, *edges, *([warm + stages, warm + stages + 1] if turns.parted else []))


def _backward_edges(turns: ScheduleIndex) -> Ints:
    change, stages = _changes(turns), turns.stages
    both = change - turns.warm - 1
    """Forward passes go on to another chunk, or have come to their end."""
    edges = [change - 2, change - 1, change, change + 1, both - 1, both, both + 1]
    return _edges(turns, *edges, *([stages, stages + 1] if turns.parted else []))


def _weight_edges(turns: ScheduleIndex) -> Ints:
    change = _changes(turns)
    without = turns.count - turns.stages - 1
    """From there on no other backward pass comes between."""
    drained = without - turns.warm
    edges = [change - 2, change - 1, change, change + 1]
    edges += [each + beside for each in (without, drained) for beside in (-1, 0, 1)]
    return _edges(turns, *edges)
