"""Moved: bytes that a device reads and writes for a pass beside what the pass's ops do."""

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from windlass.spec.graph import LayerKind

Number = TypeVar("Number", float, npt.NDArray[np.float64])

_TOKEN_BYTES = 8
_SUM_BYTES = 4
"""Gradients are summed in float32."""


def loaded_bytes(tokens: Number) -> Number:
    """Inputs and targets of a micro-batch of so many tokens are copied once."""
    return 2 * 2 * tokens * _TOKEN_BYTES


def taken_over_bytes(elements: Number, gradient_bytes: int) -> Number:
    """Adding a gradient that came from another stage: two reads and a write."""
    return 3 * elements * gradient_bytes


def summed_bytes(
    kind: LayerKind, weight_bytes: int, gradient_bytes: int, *, shared: int, rows: int, first: bool
) -> tuple[int, ...]:
    """Adding a layer's fresh gradients to what is there, of each op that does so.

    The first are taken over as they are, but for what is there already; in bfloat16 with
    accumulation they are copied into float32. Rows are added to a gradient; where there is none
    yet, one of zeros is made first.

    Args:
        kind: of the layer.
        weight_bytes: of a fresh gradient's element.
        gradient_bytes: of a sum's.
        shared: elements whose gradient another layer of the stage has made before.
        rows: elements that a pass gives of a layer that looks rows up.
        first: whether they are the first micro-batch's.
    """
    each = weight_bytes + 2 * gradient_bytes
    counts = [parameter.count for parameter in kind.parameters]
    if kind.looks_up:
        made = (kind.parameter_count - shared) * gradient_bytes if first else 0
        return rows * each, made
    if not first:
        return (sum(counts) * each,)
    converted = counts if gradient_bytes != weight_bytes else []
    return shared * each, *(count * (weight_bytes + _SUM_BYTES) for count in converted)
