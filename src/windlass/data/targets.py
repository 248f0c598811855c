"""Targets of examples: which of them count in the loss, and how much."""

from typing import Any

import numpy as np
import numpy.typing as npt

from windlass.data.batches import TokenBatch

IGNORED_TARGET = -100
"""The only target that is no token: it does not count in the loss."""
ExampleArray = npt.NDArray[Any]
"""Token ids or numbers of some examples, `[example ...]`."""
_WEIGHTED_DIMENSIONS = 3


def weight_bits(weights: npt.NDArray[np.float32]) -> TokenBatch:
    """Weights of targets as whole numbers, which stand beside them in one array: their bits.

    Targets with weights are `Int[b 2 s]`: tokens `[:, 0]`, and the bits of their weights `[:, 1]`.
    """
    return np.asarray(weights, dtype=np.float32).view(np.int32).astype(np.int64)


def with_one_target(targets: ExampleArray) -> ExampleArray:
    """A copy of targets of which the first one counts."""
    targets = targets.copy()
    if targets.dtype.kind == "f":
        targets[0] = 0
    elif targets.ndim == _WEIGHTED_DIMENSIONS:
        targets[0, :, 0] = 0, weight_bits(np.ones(1, dtype=np.float32))[0]
    else:
        targets.flat[0] = 0
    return targets


def target_counts(targets: ExampleArray) -> TokenBatch:
    """Number of targets of each example that count in the loss, `Int[example]`.

    An example with numbers counts once, and not at all if one of them is NaN, not known. Weights of
    targets are summed, `Float[example]`.
    """
    if targets.dtype.kind == "f":
        return np.asarray(~np.isnan(targets).any(axis=1), dtype=np.int64)
    if targets.ndim == _WEIGHTED_DIMENSIONS:
        weights = targets[:, 1].astype(np.int32).view(np.float32).astype(np.float64)
        totals: TokenBatch = np.where(targets[:, 0] == IGNORED_TARGET, 0.0, weights).sum(axis=1)
        return totals
    rows = targets.reshape(len(targets), -1)
    counts: TokenBatch = np.count_nonzero(rows != IGNORED_TARGET, axis=1)
    return counts
