"""How many micro-batches a stage holds at its fullest moments, by chunk of layers, from its order.

A micro-batch is held from its forward pass to the end of its backward pass. Moments of four sorts
matter: forward passes before and after gradients are there, and backward passes that make them or
add to them. Of each sort the one at which most is held stands for all.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np

from windlass.cost.closed_layers import Floats
from windlass.cost.closed_levels import Shape
from windlass.program.instruction import BACKWARDS
from windlass.program.schedule import Pass, taken

Moment = Literal["first forward", "forward", "first backward", "backward", "first weight", "weight"]
"""The first ones find no gradient yet; `weight` is the weights' part of a parted backward pass."""

MOMENTS: tuple[Moment, ...] = (
    "first forward", "forward", "first backward", "backward", "first weight", "weight",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Micro-batches at one sort of moment.

    A row for each chunk at work, a column for each chunk of its stage.
    """

    open: Floats
    """Whose backward pass has not begun, that of the pass at work among them; 0 in a row of a chunk
    that has no such moment."""
    parted: Floats
    """Whose backward pass waits for its weights' part."""
    growth: Floats
    """How many more are open with each micro-batch beyond the settled ones."""
    there: Floats
    """Of each row 1 if there is such a moment, else 0."""


def held(shape: Shape, layers: tuple[int, ...]) -> dict[Moment, Held]:
    """What is held at the fullest moment of each sort.

    Args:
        shape: of the plans.
        layers: of each chunk, which tell how full a moment is.
    """
    if not shape.repeats:
        return _held(shape, layers)
    short, long = (
        _held(shape._replace(micros=micros), layers)
        for micros in (shape.settled, shape.settled + shape.pipeline)
    )
    return {
        moment: replace(low, growth=(long[moment].open - low.open) / shape.pipeline)
        for moment, low in short.items()
    }


@lru_cache(maxsize=512)
def _held(shape: Shape, layers: tuple[int, ...]) -> dict[Moment, Held]:
    side = (shape.chunks, shape.interleave)
    found = {
        moment: Held(
            open=np.zeros(side), parted=np.zeros(side), growth=np.zeros(side),
            there=np.zeros(shape.chunks),
        )
        for moment in MOMENTS
    }  # fmt: skip
    for stage in range(shape.pipeline):
        _walk(shape, stage, layers, found)
    return found


def _walk(shape: Shape, stage: int, layers: tuple[int, ...], found: dict[Moment, Held]) -> None:
    sizes = layers[stage :: shape.pipeline]
    open_, parted = [0] * shape.interleave, [0] * shape.interleave
    begun, full = False, 0
    fullest: dict[tuple[Moment, int], int] = {}
    kept: dict[tuple[Moment, int], tuple[list[int], list[int]]] = {}
    order, micros = shape.order, shape.micros
    for turn in taken(order, shape.pipeline, stage, micros, chunks=shape.interleave):
        kind, _, chunk = turn
        if kind == "forward":
            open_[chunk] += 1
            full += sizes[chunk]
        key = (_moment(turn, begun=begun), chunk)
        if full > fullest.get(key, 0):
            fullest[key], kept[key] = full, (open_[:], parted[:])
        if kind != "forward":
            begun = begun or kind in BACKWARDS
            if kind == "backward input":
                parted[chunk] += 1
            if kind == "backward weight":
                parted[chunk] -= 1
            else:
                open_[chunk] -= 1
            full -= sizes[chunk] if kind in BACKWARDS else 0
    for (moment, chunk), (opened, waiting) in kept.items():
        at, row = found[moment], chunk * shape.pipeline + stage
        at.open[row], at.parted[row], at.there[row] = opened, waiting, 1.0


def _moment(turn: Pass, *, begun: bool) -> Moment:
    if turn.kind == "forward":
        return "forward" if begun else "first forward"
    if turn.kind == "backward weight":
        return "weight" if turn.micro else "first weight"
    if turn.kind == "backward input":
        return "backward" if begun else "first backward"
    return "first backward" if turn.micro == 0 else "backward"
