"""Stage sums: which chunk and stage each layer is in, and sums over the layers of each.

Numbers are given by layer kind, so a sum over layers is one over kinds. Chunks and stages with as
many layers of each kind have the same sums.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from windlass.cost.arrays import Floats, Ints
from windlass.cost.batched.config_keys import RecomputeConfig
from windlass.cost.batched.schedule_index import PipelineShape
from windlass.schema import Recompute


class StagePartition:
    """The layers of each chunk and stage of one pipeline shape.

    Args:
        shape: the pipeline shape.
        ends: first layer of each chunk, and the number of layers.
        kinds: kind of each layer, `[layer]`.
    """

    def __init__(self, shape: PipelineShape, ends: tuple[int, ...], kinds: Ints) -> None:
        self.shape, self.ends, self.kinds, self.layers = shape, ends, kinds, ends[-1]
        self.chunk = np.repeat(np.arange(shape.chunks), np.diff(ends))
        self.stage = self.chunk % shape.pipeline
        self._until = _until(kinds, np.ones(self.layers))
        by_chunk = np.diff(self._until[np.array(ends)], axis=0)
        by_stage = by_chunk.reshape(shape.virtual_stages, shape.pipeline, -1).sum(axis=0)
        self._chunks, alike = np.unique(by_chunk, axis=0, return_inverse=True)
        self.chunk_sort = np.asarray(alike.ravel())
        """A number that chunks with as many layers of each kind share, `[chunk]`."""
        self._stages, alike = np.unique(by_stage, axis=0, return_inverse=True)
        self.sort = np.asarray(alike.ravel())
        """A number that stages with as many layers of each kind share, `[stage]`."""

    def over(self, each: Floats, low: int, high: int) -> Floats:
        """The sum over consecutive layers."""
        return np.asarray(each @ (self._until[high] - self._until[low]))

    def counts(self, low: Ints | int, high: Ints | int) -> Floats:
        """Layers of each kind in ranges of consecutive layers, `[range, kind]`."""
        return np.asarray(self._until[high] - self._until[low])

    def by_chunk(self, each: Floats) -> Floats:
        """The sum over each chunk."""
        return np.asarray((each @ self._chunks.T)[..., self.chunk_sort])

    def by_sort(self, each: Floats) -> Floats:
        """The sum over the stages of each sort."""
        return np.asarray(each @ self._stages.T)

    def by_stage(self, each: Floats) -> Floats:
        """The sum over each stage."""
        return np.asarray(self.by_sort(each)[..., self.sort])


@dataclass(frozen=True, slots=True)
class RecomputeSums:
    """What recomputed layers add, `[config, ...]`."""

    each: Floats
    """Full recompute by kind, then selective recompute by kind, `[config, 2 x kind]`."""
    patterns: Sequence[Sequence[Recompute]]
    """Recompute mode of each layer; each pattern once."""
    pattern: Ints
    """Index among `patterns`, `[config]`."""


class LayerSums:
    """Sums over layers for many configs.

    Args:
        parts: partition of the layers.
        each: number of a layer, `[config, kind]`.
        again: what recomputed layers add; None for nothing.
    """

    def __init__(
        self, parts: StagePartition, each: Floats, again: RecomputeSums | None = None
    ) -> None:
        self._parts, self._each, self._again = parts, each, again
        patterns = () if again is None else again.patterns
        self._until = [_until_again(parts.kinds, np.array(layers)) for layers in patterns]

    def over(self, low: int, high: int) -> Floats:
        """The sum over consecutive layers, `[config]`."""
        found = self._parts.over(self._each, low, high)
        if self._again is not None:
            counts = np.stack([until[high] - until[low] for until in self._until])
            if counts.any():
                found += (self._again.each * counts[self._again.pattern]).sum(axis=1)
        return found

    def over_each(self, low: Ints | int, high: Ints | int) -> Floats:
        """The sums over ranges of consecutive layers, `[range, config]`."""
        found = self._parts.counts(low, high) @ self._each.T
        if self._again is not None:
            counts = np.stack([until[high] - until[low] for until in self._until])
            if counts.any():
                found += np.einsum("rtk,rk->tr", counts[self._again.pattern], self._again.each)
        return np.asarray(found)

    def by_chunk(self) -> Floats:
        """The sum over each chunk, `[config, chunk]`."""
        found = self._parts.by_chunk(self._each)
        if self._again is not None:
            for at, until in enumerate(self._until):
                counts = np.diff(until[np.array(self._parts.ends)], axis=0)
                rows = self._again.pattern == at
                if counts.any() and rows.any():
                    found[rows] += self._again.each[rows] @ counts.T
        return found


def _until_again(kinds: Ints, modes: npt.NDArray[np.str_]) -> Floats:
    """Running counts of recomputed layers, in the order of `RecomputeSums.each`."""
    found = [_until(kinds, (modes == mode) * 1.0) for mode in ("full", "selective")]
    return np.concatenate(found, axis=1)


def _until(kinds: Ints, counted: Floats) -> Floats:
    """Layers of each kind before each layer, and before the end, `[layer + 1, kind]`."""
    of_kind = (kinds[:, None] == np.arange(int(kinds.max()) + 1)) * counted[:, None]
    return np.concatenate([np.zeros_like(of_kind[:1]), np.cumsum(of_kind, axis=0)])


@lru_cache(maxsize=2048)
def recompute_by_layer(
    shape: PipelineShape, ends: tuple[int, ...], again: RecomputeConfig
) -> tuple[Recompute, ...]:
    """Recompute mode of each layer; the first and the last one are never recomputed."""
    found: list[Recompute] = []
    for chunk, (begin, end) in enumerate(pairwise(ends)):
        stage, able = chunk % shape.pipeline, max(0, min(end, ends[-1] - 1) - max(1, begin))
        whole = min(again.full[stage], able) if again.full else 0
        some = min(again.selective[stage], able) if again.selective else 0
        some = able - whole if whole and some else some
        modes: tuple[tuple[Recompute, int], ...] = (
            ("none", max(0, min(1, end) - begin)),
            ("full", whole),
            ("selective", some),
        )
        found += [mode for mode, count in modes for _ in range(count)]
        found += ["none"] * (end - len(found))
    return tuple(found)
