"""Speed check: a fixed piece of work of half a second that shows how fast the machine is now.

`python -m windlass.hardware.probe.speed_check` prints its seconds. A machine that others share
changes its speed from minute to minute, which no prediction can know beforehand.
"""

import sys
from itertools import cycle

import torch

from windlass.hardware.probe.disk_and_network import CpuContention
from windlass.hardware.probe.matmul import DTYPES, probed_precisions
from windlass.hardware.probe.stopwatch import Stopwatch
from windlass.schema import Precision
from windlass.torch_ext import accelerator_device, device_for

_TOKENS, _WIDTH = 1024, 768
_WEIGHT_COPIES = 16
"""Weights used in turn, so that they come from memory and not from a cache, as a model's do."""
_SUM_ELEMENTS = 2**24
"""Elements of a sum that is too large for any cache."""
_BUDGET_SECONDS = 0.3
"""Time budget of each part."""


def speed_check_seconds(device: torch.device, *, budget_seconds: float = _BUDGET_SECONDS) -> float:
    """Seconds of the check: one matrix product in each precision and one element-wise sum.

    Args:
        budget_seconds: time to spend on each part.
    """
    waiting = CpuContention()
    watch = Stopwatch(device, budget_seconds=budget_seconds, waiting_share=waiting.take_share)
    products = sum(
        _matmul_seconds(precision, watch) for precision in probed_precisions(device_for(device))
    )
    seconds = products + _sum_seconds(watch)
    waiting.close()
    return seconds


def _matmul_seconds(precision: Precision, watch: Stopwatch) -> float:
    dtype, device = DTYPES[precision], watch.device
    x = torch.ones(_TOKENS, _WIDTH, device=device, dtype=dtype)
    weight = torch.ones(_WIDTH, _WIDTH, device=device, dtype=dtype)
    weights = cycle([weight.clone() for _ in range(_WEIGHT_COPIES)])
    return watch.seconds(lambda: x @ next(weights))


def _sum_seconds(watch: Stopwatch) -> float:
    x, y, z = (torch.ones(_SUM_ELEMENTS, device=watch.device) for _ in range(3))
    return watch.seconds(lambda: torch.add(x, y, out=z))


def main() -> None:
    """Prints the seconds that the check takes on this machine now."""
    sys.stdout.write(f"{speed_check_seconds(accelerator_device().torch_device)}\n")


if __name__ == "__main__":
    main()
