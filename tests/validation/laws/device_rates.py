"""The rates of a device that follow from a stack's fitted constants, as in a machine's file."""

from collections.abc import Mapping

import numpy as np

from windlass.validation.formulas import product_seconds
from windlass.validation.software_stacks import stack_catalog
from windlass.validation.stack_constants import calibration

SIZES = (1e6, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13)
"""FLOP of one product."""
_ASPECTS = (0.25, 1.0, 4.0)
"""Columns over depth of the products that one point averages, as in a transformer's block."""
_NEAR = np.geomspace(1 / 1.4, 1.4, 9)
"""Sizes that one point averages, relative to its own: waves make neighbours differ."""
_HEAD = 128.0
"""Head width for which the rate of attention is stated."""
_HALF = 2e10
"""FLOP of attention at which half of its rate is reached; a convention of the machines' files."""

Points = tuple[tuple[float, float], ...]


def product_rates(stack: str, device: str) -> Points:
    """FLOP/s over FLOP of one product: the mean over shapes and sizes near each point."""
    k, known = calibration(stack).values, stack_catalog().device(device)
    return tuple((size, _rate(k, size, known.peak, known.processors)) for size in SIZES)


def attention_rates(stack: str, device: str) -> Points:
    """FLOP/s over FLOP of attention, counted over the full square of scores."""
    k, known = calibration(stack).values, stack_catalog().device(device)
    most = known.peak * k["gpu.products"] * k["gpu.attention"] / k["gpu.scored"]
    most /= 1.0 + k["gpu.ramp"] / _HEAD
    return tuple((size, most * size / (size + _HALF)) for size in (1e8, 1e10, 1e12))


def _rate(k: Mapping[str, float], size: float, peak: float, processors: float) -> float:
    flop = size * np.repeat(_NEAR, len(_ASPECTS))
    side = (flop / 2.0) ** (1.0 / 3.0)
    wider = np.sqrt(np.tile(_ASPECTS, len(_NEAR)))
    seconds = product_seconds(
        side, side * wider, side / wider, flop_rate=peak * k["gpu.products"],
        processors=processors, ramp=k["gpu.ramp"],
        whole_waves=min(k["gpu.whole_waves"], 1.0),
    )  # fmt: skip
    return float(np.exp(np.mean(np.log(flop / seconds))))
