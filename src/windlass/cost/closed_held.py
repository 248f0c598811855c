"""How many micro-batches a stage holds at its fullest moments, by chunk of layers, from its order.

A micro-batch is held from its forward pass to the end of its backward pass. Moments of four sorts
matter: forward passes before and after gradients are there, and backward passes that make them or
add to them. Of each sort the one at which most is held stands for all.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from windlass.cost.closed_layers import Floats
from windlass.cost.closed_pipeline import Shape
from windlass.program.instruction import BACKWARDS
from windlass.program.schedule import Pass, taken

Moment = Literal["first forward", "forward", "first backward", "backward", "first weight", "weight"]
"""The first ones find no gradient yet; `weight` is the weights' part of a parted backward pass."""

MOMENTS: tuple[Moment, ...] = (
    "first forward", "forward", "first backward", "backward", "first weight", "weight",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Micro-batches at one sort of moment: a row for each chunk at work, a column for each held."""

    open: Floats
    """Whose backward pass has not begun, that of the pass at work among them; 0 in a row of a chunk
    that has no such moment."""
    parted: Floats
    """Whose backward pass waits for its weights' part."""
    there: Floats
    """Of each row 1 if there is such a moment, else 0."""


def held(shape: Shape, layers: tuple[int, ...]) -> dict[Moment, Held]:
    """What is held at the fullest moment of each sort.

    Args:
        shape: of the plans.
        layers: of each chunk, which tell how full a moment is.
    """
    settled = shape.pipeline * (4 if shape.interleave > 1 else 3)
    if shape.micros <= settled + shape.pipeline:
        return _held(shape, layers)
    short = _held(shape._replace(micros=settled), layers)
    long = _held(shape._replace(micros=settled + shape.pipeline), layers)
    times = (shape.micros - settled) / shape.pipeline
    return {
        moment: Held(
            open=low.open + times * (long[moment].open - low.open),
            parted=low.parted + times * (long[moment].parted - low.parted),
            there=low.there,
        )
        for moment, low in short.items()
    }


@lru_cache(maxsize=512)
def _held(shape: Shape, layers: tuple[int, ...]) -> dict[Moment, Held]:
    side = (shape.chunks, shape.chunks)
    found = {
        moment: Held(open=np.zeros(side), parted=np.zeros(side), there=np.zeros(side[0]))
        for moment in MOMENTS
    }
    for stage in range(shape.pipeline):
        _walk(shape, stage, layers, found)
    return found


def _walk(shape: Shape, stage: int, layers: tuple[int, ...], found: dict[Moment, Held]) -> None:
    own = slice(stage, None, shape.pipeline)
    open_, parted = np.zeros(shape.interleave), np.zeros(shape.interleave)
    begun, sizes = False, np.array(layers[own], dtype=np.float64)
    fullest: dict[tuple[Moment, int], float] = {}
    for turn in taken(shape.order, shape.pipeline, stage, shape.micros, chunks=shape.interleave):
        if turn.kind == "forward":
            open_[turn.chunk] += 1
        moment = _moment(turn, begun=begun)
        at, row = found[moment], turn.chunk * shape.pipeline + stage
        full = float((open_ + parted) @ sizes)
        if not at.there[row] or full > fullest[moment, turn.chunk]:
            fullest[moment, turn.chunk] = full
            at.open[row, own], at.parted[row, own], at.there[row] = open_, parted, 1.0
        if turn.kind in ("backward", "backward input"):
            open_[turn.chunk] -= 1
            parted[turn.chunk] += turn.kind == "backward input"
        elif turn.kind == "backward weight":
            parted[turn.chunk] -= 1
        begun = begun or turn.kind in BACKWARDS


def _moment(turn: Pass, *, begun: bool) -> Moment:
    if turn.kind == "forward":
        return "forward" if begun else "first forward"
    if turn.kind == "backward weight":
        return "weight" if turn.micro else "first weight"
    if turn.kind == "backward input":
        return "backward" if begun else "first backward"
    return "first backward" if turn.micro == 0 else "backward"
