"""Collects the errors of a comparison: the largest of each quantity, and the first mismatch."""

import math
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from windlass.schema import (
    ComparedQuantity,
    Mismatch,
    QuantityComparison,
    VerificationResult,
)

_MIN_SCALE_SHARE = 0.01
"""Smallest scale of a tensor's error, as a share of the largest value in its layer. It matters
where all values are zero except for rounding, as in the gradient of the keys' bias, which softmax
cancels: rounding errors have the size of the layer's other values."""


class ErrorRecord:
    """The errors of one comparison, added in the order in which a step computes things."""

    def __init__(
        self, layer_names: Sequence[str], tolerance: Mapping[ComparedQuantity, float]
    ) -> None:
        self._layer_names, self._tolerance = layer_names, tolerance
        self._worst: dict[ComparedQuantity, tuple[int, float]] = {}
        """Number of comparisons and largest error, by quantity."""
        self._first_mismatch: Mismatch | None = None

    def add(
        self,
        quantity: ComparedQuantity,
        step: int,
        error: float,
        *,
        layer: int | None = None,
        weight: str | None = None,
        sample: int | None = None,
    ) -> None:
        """Adds the relative error of one value or tensor; NaN counts as infinite."""
        error = math.inf if math.isnan(error) else error
        count, worst = self._worst.get(quantity, (0, 0.0))
        self._worst[quantity] = (count + 1, max(worst, error))
        if self._first_mismatch is None and error > self._tolerance[quantity]:
            self._first_mismatch = Mismatch(
                step=step, quantity=quantity, error=error, layer=layer, weight=weight,
                sample=sample, layer_name=None if layer is None else self._layer_names[layer],
            )  # fmt: skip

    def result(self, steps: int) -> VerificationResult:
        """The result over all that was added."""
        return VerificationResult(
            steps=steps,
            comparisons=tuple(
                QuantityComparison(
                    quantity=quantity, count=count, error=error, tolerance=self._tolerance[quantity]
                )
                for quantity, (count, error) in self._worst.items()
            ),
            first_mismatch=self._first_mismatch,
        )


def relative_error(actual: float | None, expected: float) -> float:
    """The difference as a share of the expected value, or itself where that is zero.

    NaN if there is no actual value.
    """
    if actual is None:
        return math.nan
    return abs(actual - expected) / abs(expected) if expected else abs(actual)


def tensor_error(
    actual: Tensor | None,
    expected: Tensor,
    scales: Sequence[float] = (1.0, 1.0),
    min_scale: float = 0.0,
) -> float:
    """Largest difference, relative to the largest expected value; infinite if one is missing.

    Args:
        actual: the tensor to compare; None if it is missing.
        min_scale: the least value of `expected` that an error is relative to.
    """
    if actual is None or actual.shape != expected.shape:
        return math.inf
    scale = max(_largest_value(expected), min_scale) * scales[1]
    error = _largest_value(actual.double() * scales[0] - expected.double() * scales[1])
    return error / scale if scale else error


def least_scale(expected: Iterable[Tensor]) -> float:
    """The least value that errors of one layer's tensors are relative to."""
    return _MIN_SCALE_SHARE * max(map(_largest_value, expected), default=0.0)


def _largest_value(tensor: Tensor) -> float:
    return float(tensor.double().abs().max()) if tensor.numel() else 0.0
