"""Operands of measured work: random numbers, from memory and not from a cache if need be."""

from collections.abc import Iterator
from itertools import cycle
from math import prod

import torch
from torch import Tensor

from windlass.hardware.local_machine import last_level_cache_bytes

_LEAST_BYTES, _MOST_BYTES = 2**26, 2**30
_CACHES = 1.5
"""Memory over the last-level cache: what is read in turn from so much has left the cache before
its turn comes again."""
_RANDOM_NUMBERS = 2**18
"""Random numbers that fill operands again and again: to draw all of them would take seconds."""

_MOST_TENSORS = 4096
"""Tensors that are used before the first is used again; a measurement ends sooner."""


def random_numbers(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of normally distributed numbers, of which large ones repeat some."""
    count = prod(shape)
    drawn = torch.randn(min(count, _RANDOM_NUMBERS), device=device).to(dtype)
    return drawn.repeat(-(-count // len(drawn)))[:count].view(shape)


class ColdMemory:
    """Hands out memory in turn, the part first that was used longest ago.

    Args:
        device: where it is; an accelerator, whose caches are small, has one tensor at a time.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._values: Tensor | None = None
        if device.type == "cpu":
            numbers = cold_bytes() // dtype.itemsize
            self._values = random_numbers(numbers, dtype=dtype, device=device)
        self._used = 0
        """Elements before the part that was used longest ago."""

    def tensors(self, rows: int, columns: int) -> Iterator[Tensor]:
        """Tensors `[rows columns]` without end."""
        if self._values is None:
            one = random_numbers(rows, columns, dtype=self._dtype, device=self._device)
            while True:
                yield one
        elements = rows * columns
        if elements > len(self._values):
            self._values = self._values.repeat(-(-elements // len(self._values)))
        whole = len(self._values) // elements
        parts = self._values[: whole * elements].view(whole, rows, columns)
        first = -(-self._used // elements)  # tensors of another shape end within one of these
        places = [(first + at) % whole for at in range(min(whole, _MOST_TENSORS))]
        for place, tensor in cycle([(place, parts[place]) for place in places]):
            self._used = (place + 1) * elements
            yield tensor


def cold_bytes() -> int:
    """Bytes that this host's last-level cache is too small for; it may be one that others share."""
    cache = last_level_cache_bytes() or 0
    return min(max(_LEAST_BYTES, round(_CACHES * cache)), _MOST_BYTES)
