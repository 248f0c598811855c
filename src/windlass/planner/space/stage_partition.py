"""Partitions layers into pipeline stages so that the slowest stage is as quick as possible."""

from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from windlass.schema import Graph, LayerKind

LayerRanges = tuple[tuple[int, int], ...]


def stage_partition(graph: Graph, count: int, sequence: int) -> LayerRanges:
    """The layers in `count` ranges, the slowest of which is as quick as possible.

    Args:
        graph: a graph of at least `count` layers.
    """
    works = {kind: _forward_flop(graph.kinds[kind], sequence) for kind in graph.kinds}
    return balanced_partition(tuple(works[kind.name] for kind in graph.layer_kinds()), count)


def balanced_partition(works: tuple[float, ...], count: int) -> LayerRanges:
    """Partitions works into `count` ranges so that the largest sum is as small as possible."""
    split_points = _split_points(works)
    ends = [len(works)]
    for stage in reversed(range(1, count)):
        ends.append(int(split_points[stage][ends[-1]]))
    return tuple(pairwise([0, *reversed(ends)]))


@lru_cache(maxsize=512)
def _split_points(works: tuple[float, ...]) -> npt.NDArray[np.intp]:
    """Where the last of `k + 1` balanced ranges of the works before `end` begins, `[k, end]`.

    By dynamic programming: `best(k, end) = min over begin of max(best(k-1, begin), work)`.
    """
    layers = count = len(works)
    sums = np.concatenate([[0.0], np.cumsum(works)])
    within = np.where(np.tri(layers + 1, k=-1, dtype=bool), sums[:, None] - sums[None, :], np.inf)
    best, split_points = sums.copy(), np.zeros((count, layers + 1), dtype=np.intp)
    best[0] = np.inf
    for stage in range(1, count):
        slowest = np.maximum(best[None, :], within)  # [end, begin]
        split_points[stage] = slowest.argmin(axis=1)
        best = slowest.min(axis=1)
    return split_points


def _forward_flop(kind: LayerKind, sequence: int) -> float:
    plain = (cost for cost in kind.costs if cost.precision == "float32" and not cost.compiled)
    cost = next(plain, kind.costs[0])  # other stacks than Windlass's own have no float32
    return sum(op.flop.at(1, sequence) for op in cost.forward)
