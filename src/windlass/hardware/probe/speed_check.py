"""Yardstick: the same short piece of work, always, that tells how fast a machine is just now.

`python -m windlass.hardware.probe.speed_check` prints the seconds of one turn. A machine that
others share changes its speed from minute to minute, and no prediction can know that beforehand.
"""

import sys
from itertools import cycle

import torch

from windlass.hardware.probe.matmul import DTYPES
from windlass.hardware.probe.stopwatch import Stopwatch
from windlass.schema.graph import Precision

_TOKENS, _WIDTH = 1024, 768
_SETS = 16
"""Weights in turn, so that they come from memory as those of a model do."""
_TRAFFIC = 2**24
"""Elements of a sum that no cache holds."""
_BUDGET_SECONDS = 0.3
"""For each part."""


def speed_check_seconds(device: torch.device) -> float:
    """Seconds of one turn: a product in each precision, and plain traffic; takes half a second."""
    watch = Stopwatch(device, budget_seconds=_BUDGET_SECONDS)
    return sum(_product_seconds(precision, watch) for precision in DTYPES) + _traffic_seconds(watch)


def _product_seconds(precision: Precision, watch: Stopwatch) -> float:
    dtype, device = DTYPES[precision], watch.device
    x = torch.ones(_TOKENS, _WIDTH, device=device, dtype=dtype)
    weight = torch.ones(_WIDTH, _WIDTH, device=device, dtype=dtype)
    weights = cycle([weight.clone() for _ in range(_SETS)])
    return watch.seconds(lambda: x @ next(weights))


def _traffic_seconds(watch: Stopwatch) -> float:
    x, y, z = (torch.ones(_TRAFFIC, device=watch.device) for _ in range(3))
    return watch.seconds(lambda: torch.add(x, y, out=z))


def main() -> None:
    """Prints the seconds of one turn on this machine, now."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    sys.stdout.write(f"{speed_check_seconds(torch.device(kind))}\n")


if __name__ == "__main__":
    main()
