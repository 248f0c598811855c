"""Stage peaks: what stages hold at their fullest moments, as counts of sizes.

At such a moment a pass of one micro-batch runs through a layer while others are live: the counts of
both are added, and moments that another one of the same sort of stage exceeds in all counts are
left out. `program.memory.pass_effects` computes the same instruction by instruction.
"""

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from windlass.cost.arrays import Floats, Ints
from windlass.cost.batched.memory.chunk_liveness import ModelChunk, chunk_liveness
from windlass.cost.batched.memory.live_microbatches import peak_moments
from windlass.cost.batched.memory.pareto import pareto_rows
from windlass.cost.batched.memory.size_classes import KindTraits, in_sizes
from windlass.cost.batched.schedule_index import PipelineShape


@dataclass(frozen=True, slots=True)
class ChainLayout:
    """How layers are partitioned, and what they are.

    Args:
        shape: pipeline shape.
        ends: first layer of each chunk, and the number of layers.
        layers: the kind of each layer, and whether it is recomputed in full.
        kinds: traits of the kinds.
        tie: a layer with tied weights and the layer that owns them, if there is one.
    """

    shape: PipelineShape
    ends: tuple[int, ...]
    layers: tuple[tuple[int, bool], ...]
    kinds: KindTraits
    tie: tuple[int, int] | None

    def chunks(self) -> list[ModelChunk]:
        """The model chunks."""
        stages = [bisect(self.ends, at) % self.shape.pipeline for at in self.tie or ()]
        lender = self.layers[self.tie[1]][0] if self.tie and len(set(stages)) == 1 else None
        found = list[ModelChunk]()
        for first, last in pairwise(self.ends):
            at = [each - first if first <= each < last else None for each in self.tie or ()]
            borrower, owner = at or (None, None)
            found.append(
                ModelChunk(
                    layers=self.layers[first:last],
                    before=self.layers[first - 1][0] if first else None,
                    ends=last == len(self.layers),
                    parted=self.shape.schedule == "zero-bubble",
                    once=self.shape.microbatches == 1,
                    borrower=borrower,
                    owner=owner,
                    lender=lender if at != [None, None] else None,
                )
            )
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePeaks:
    """Moments at which stages may be fullest, `[moment]`."""

    columns: Ints
    """The sizes that occur, as columns of `KindTraits`."""
    counts: Floats
    """Counts of these sizes, `[moment, size]`."""
    growth: Floats | None
    """Counts that each micro-batch beyond the settled ones adds; None for nothing."""
    firsts: Ints
    """The first moment of each sort of stage among those that do not depend on shards."""
    telling: tuple[int, ...]
    """Sort of stage of each of the other moments, at which some gradients are reduced already."""


@lru_cache(maxsize=2048)
def stage_peaks(layout: ChainLayout, sorts: tuple[int, ...]) -> StagePeaks:
    """The moments at which stages may be fullest.

    Args:
        layout: layout of the plans.
        sorts: a number for each stage; stages that share it are represented by their fullest
            moments.
    """
    held = _held(layout, sorts)
    held = held.only(pareto_rows(held.counts, held.keys))
    whole = held.with_places()
    sizes, width = in_sizes(layout.kinds), layout.kinds.width
    shards = [*layout.kinds.columns("shard"), *layout.kinds.columns("flat")]
    tells = np.asarray((whole.counts[:, :width] @ sizes)[:, shards].any(axis=1))
    # Both groups are filtered separately, so that each stage keeps some of the first.
    kept = np.array(pareto_rows(whole.counts, whole.sort + tells * (1 + max(sorts))))
    whole, tells = whole.only(kept), tells[kept]
    now, grows = (counts @ sizes for counts in np.split(whole.counts, 2, axis=1))
    columns = np.flatnonzero(now.any(axis=0))
    return StagePeaks(
        columns=columns,
        counts=now[:, columns],
        growth=grows[:, columns] if grows.any() else None,
        firsts=np.flatnonzero(np.diff(whole.sort[~tells], prepend=-1)),
        telling=tuple(whole.sort[tells].tolist()),
    )


@dataclass(frozen=True, slots=True)
class _Held:
    """Moments of all stages, `[moment]`."""

    counts: Floats
    """Counts of steps of sizes, and then how many more with each micro-batch."""
    sort: Ints
    """Sort of the stage."""
    work: Ints
    """Index in `places` of what the pass holds."""
    places: tuple[Floats, ...]
    """What each pass holds at each layer of its chunk."""

    @property
    def keys(self) -> Ints:
        """A number that moments share to which the same places are added."""
        return self.sort * len(self.places) + self.work

    def only(self, chosen: Sequence[int] | Ints) -> "_Held":
        """Some of the moments."""
        return _Held(self.counts[chosen], self.sort[chosen], self.work[chosen], self.places)

    def with_places(self) -> "_Held":
        """The moments with what the pass holds at each layer of its chunk."""
        places = [self.places[work] for work in self.work.tolist()]
        found = self.only(np.repeat(np.arange(len(places)), [len(rows) for rows in places]))
        own = np.concatenate(places)
        found.counts[:, : own.shape[1]] += own
        return found


def _held(layout: ChainLayout, sorts: tuple[int, ...]) -> _Held:
    """What other micro-batches, gradients and weights of all layers hold."""
    pipeline, chunks = layout.shape.pipeline, layout.chunks()
    unlike = {chunk: number for number, chunk in enumerate(dict.fromkeys(chunks))}
    found = [chunk_liveness(chunk, layout.kinds) for chunk in unlike]
    held = np.stack([each.held for each in found], axis=1)
    number = np.array([unlike[chunk] for chunk in chunks]).reshape(-1, pipeline)
    stages: dict[tuple[int, ...], int] = {}
    alike = [stages.setdefault(each, len(stages)) for each in zip(sorts, *number, strict=True)]
    at = peak_moments(layout.shape, tuple(alike))
    times = np.concatenate([at.open, at.waiting, at.made, at.over, at.begun], axis=1)
    width = layout.kinds.width
    rows = np.zeros((len(at.stage), 2 * width))
    for stage in np.flatnonzero(np.bincount(at.stage)):
        own = at.stage == stage
        sizes = held[:, number[:, stage]]
        rows[own, :width] = times[own] @ sizes.reshape(-1, width)
        rows[own, width:] = at.growth[own] @ sizes[0]
    work = np.array([number[at.chunk, at.stage], at.kind, at.first, at.last])
    sides = tuple(1 + work.max(axis=1))
    passes, place = np.unique(np.ravel_multi_index(tuple(work), sides), return_inverse=True)
    places = [
        found[chunk].places[kind, first, last]
        for chunk, kind, first, last in zip(*np.unravel_index(passes, sides), strict=True)
    ]
    return _Held(rows, np.array(sorts)[at.stage], place, tuple(places))
