"""Delay of first passes by gathering weights, as max-plus sums.

Each chunk's weights are gathered before its first pass, which starts once they are whole and its
message has arrived. So what a gather takes beyond the time in which its stage would have waited
anyway delays that pass, what the stage does next, and what the next chunk waits for. If stages have
several chunks, paths through their first passes are distinguished by how many gathers lie on them.
"""

from typing import NamedTuple

import numpy as np

from windlass.cost.arrays import Floats
from windlass.cost.batched.max_plus import MaxPlus, MaxPlusTerm
from windlass.cost.batched.pipeline.level_simulator import FirstPassTimes
from windlass.cost.batched.stage_sums import StagePartition


def gather_delay(parts: StagePartition, firsts: FirstPassTimes, gather: Floats) -> MaxPlus:
    """Delay of the passes of plans of one shape, a single item.

    Args:
        parts: partition of the layers.
        firsts: the first passes of chunks.
        gather: seconds to gather a layer, `[option, kind]`.
    """
    by_chunk = parts.by_chunk(gather)
    if parts.shape.virtual_stages == 1:
        own = firsts.free - firsts.begun
        gathered = [MaxPlusTerm(*each) for each in zip(own, by_chunk.T, strict=True)]
        return MaxPlus.of_terms(
            [[MaxPlusTerm(np.zeros(own.shape[1]), np.zeros(len(gather))), *gathered]]
        )
    return _turns(parts, firsts, by_chunk)


class _Way(NamedTuple):
    """The gathers on a path."""

    first: bool
    """Whether that of the first chunk is on it."""
    inner: int
    """Number of those of inner chunks."""
    last: bool
    """Whether that of the last chunk is on it."""


def _turns(parts: StagePartition, firsts: FirstPassTimes, by_chunk: Floats) -> MaxPlus:
    shape = parts.shape
    pipeline, turns, end = shape.pipeline, shape.virtual_stages, shape.chunks - 1
    ways = [
        _Way(first, inner, last)
        for first in (False, True)
        for inner in range(turns + 1)
        for last in (False, True)
    ]
    places = {way: at for at, way in enumerate(ways)}
    moves = {kind: _moves(ways, places, kind) for kind in ("first", "inner", "last")}
    nowhere = np.full((1, firsts.free.shape[1]), -np.inf)
    stages = np.repeat(nowhere[None], pipeline, axis=0).repeat(len(ways), axis=1)
    stages[:, places[_Way(False, 0, False)]] = 0.0
    before = stages[0]
    final: list[Floats] = []
    for chunk in range(shape.chunks):
        stage = chunk % pipeline
        kind = "first" if chunk == 0 else "last" if chunk == end else "inner"
        gathered = np.concatenate([stages[stage], nowhere])[moves[kind]]
        own = gathered + firsts.free[chunk] - firsts.begun[chunk]
        late = np.maximum(own, before + firsts.came[chunk] - firsts.begun[chunk])
        late[places[_Way(False, 0, False)]] = 0.0
        stages[stage] = before = late
        if chunk >= end + 1 - pipeline:
            final.append(late)
    mean = by_chunk[:, 1:-1].mean(axis=1)
    lates = np.max(final, axis=0)
    return MaxPlus.of_terms(
        [
            [
                MaxPlusTerm(
                    late, way.first * by_chunk[:, 0] + way.inner * mean + way.last * by_chunk[:, -1]
                )
                for way, late in zip(ways, lates, strict=True)
                if not np.isneginf(late).all()
            ]
        ]
    )


def _moves(ways: list[_Way], places: dict[_Way, int], kind: str) -> list[int]:
    """Index of each path with one gather less; behind all others if there is none."""
    found = []
    for way in ways:
        if kind == "inner":
            before = way._replace(inner=way.inner - 1)
        else:
            before = way._replace(**{kind: False})
            if not getattr(way, kind):
                before = way._replace(inner=-1)
        found.append(places.get(before, len(ways)))
    return found
