"""Stage moments: the passes of each stage at which its memory may be fullest."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from windlass.cost.arrays import Bools, Floats, Ints
from windlass.cost.clock.plan_columns import PipelineShape
from windlass.cost.clock.schedule_levels import BACKWARD, FORWARD, WEIGHT, stage_passes


class Moment(NamedTuple):
    """One pass of each stage that is not forward."""

    is_weight: bool
    """Whether it makes the weight gradients of a split backward."""
    chunk: Ints
    """Model chunk that it runs, `[stage]`."""
    ends: Bools
    """Whether it is the last that adds to the gradients of its chunk, `[stage]`."""
    is_made: Bools
    """Whether each chunk's gradients exist before it, `[chunk]`."""
    is_done: Bools
    """Whether each chunk's last one comes before it, `[chunk]`."""
    live: Floats
    """Micro-batches of each chunk that wait for their backward pass, this one too, `[chunk]`."""
    parted: Floats
    """Micro-batches of each chunk that only wait for their weight gradients, `[chunk]`."""
    exists: Bools
    """Whether a stage has such a pass, `[stage]`."""
    microbatches: int
    """Micro-batches of the step that it is taken from."""


def moments(shape: PipelineShape) -> tuple[Moment, ...]:
    """The passes at which a shape's stages are looked at.

    Fewer micro-batches fill all stages as much as more do, except under GPipe, where all of them
    are live at first.
    """
    enough = {"gpipe": 3, "1f1b": shape.pipeline + 2, "zero-bubble": 2 * shape.pipeline + 2}
    most = enough.get(shape.schedule, 3 * shape.pipeline)
    return _moments(shape._replace(microbatches=min(shape.microbatches, most)))


@lru_cache(maxsize=1024)
def _moments(shape: PipelineShape) -> tuple[Moment, ...]:
    passes = stage_passes(shape)
    stage, splits = np.arange(shape.pipeline), shape.schedule == "zero-bubble"
    is_chunk = (passes.chunks // shape.pipeline)[..., None] == np.arange(shape.virtual_stages)
    backward = passes.kinds == BACKWARD
    adds = passes.kinds == WEIGHT if splits else backward
    last = passes.micros == shape.microbatches - 1

    def before(chosen: Bools) -> Ints:
        """Passes of each chunk before each, `[stage, turn, chunk of the stage]`."""
        counted = is_chunk & chosen[..., None]
        return np.asarray(np.cumsum(counted, axis=1) - counted)

    live, parted = (
        before(passes.kinds == FORWARD) - before(backward),
        before(backward) - before(adds),
    )
    is_made, is_done = before(adds) > 0, before(adds & last) > 0
    held = live.sum(axis=2) + 2 * parted.sum(axis=2)
    found = []
    for kind in (BACKWARD, WEIGHT) if splits else (BACKWARD,):
        passing = passes.kinds == kind
        chosen_passes = [
            _first(passing),
            passing & ~last & is_made.all(axis=2),
            _first(passing & last),
        ]
        if shape.virtual_stages > 1:
            chosen_passes.append(_first(passing & (passes.chunks < shape.pipeline)))
        for chosen in chosen_passes:
            turn = np.where(chosen, held, -1).argmax(axis=1)

            def at(counts: Ints | Bools, turn: Ints = turn) -> Ints:
                return np.asarray(counts[stage, turn].T.ravel())

            found.append(
                Moment(
                    is_weight=kind == WEIGHT,
                    chunk=passes.chunks[stage, turn],
                    ends=last[stage, turn],
                    is_made=at(is_made) > 0,
                    is_done=at(is_done) > 0,
                    live=at(live).astype(np.float64),
                    parted=at(parted).astype(np.float64),
                    exists=np.asarray(chosen.any(axis=1)),
                    microbatches=shape.microbatches,
                )
            )
    return tuple(found)


@lru_cache(maxsize=1024)
def waiting_microbatches(shape: PipelineShape) -> Floats:
    """Micro-batches that wait in each chunk when most of them wait in its stage, `[2, chunk]`.

    At any moment; and when all gradients of the stage exist and none is reduced.

    Args:
        shape: how a step runs through the stages, with all of its micro-batches.
    """
    if shape.schedule == "1f1b":
        # A stage runs ahead by as many micro-batches as there are stages from it to the last.
        ahead = np.arange(shape.pipeline, 0, -1)
        rest = shape.microbatches - np.arange(2)[:, None]
        return np.minimum(ahead, rest).astype(np.float64)
    every = [each for each in moments(shape) if not each.is_weight]
    turns = -1, shape.virtual_stages, shape.pipeline
    live = np.array([each.live for each in every])
    if shape.schedule == "gpipe" and shape.pipeline > 1:
        more = np.array([~each.ends for each in every])
        live += np.tile(more * (shape.microbatches - every[0].microbatches), shape.virtual_stages)
    live = live.reshape(turns)
    exists = np.array([each.exists for each in every])
    whole = np.array([each.is_made & ~each.is_done for each in every]).reshape(turns).all(axis=1)
    found = []
    for possible in (exists, exists & whole):
        held = np.where(possible, live.sum(axis=1), -1.0)
        stage, fullest = np.arange(shape.pipeline), held.argmax(axis=0)
        waiting = live[fullest, :, stage] * possible[fullest, stage][:, None]
        found.append(waiting.T.ravel())
    return np.array(found)


def _first(chosen: Bools) -> Bools:
    """Only the first of the chosen passes of each stage."""
    return np.asarray(chosen & (np.cumsum(chosen, axis=1) == 1))
