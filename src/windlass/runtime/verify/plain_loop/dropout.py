"""Dropout whose masks follow from the written specification, docs/reference/data-order.md."""

import hashlib
from collections.abc import Iterator, Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor, nn

from windlass.runtime.verify.plain_loop.data_order import finalized

_WORD = 2**64
_GOLDEN = 0x9E3779B97F4A7C15
_MAX_CALLS = 2**20


class PlainKeyedDropout(nn.Module):
    """Dropout whose mask follows from (seed, step, layer, position, call, sample, element)."""

    def __init__(self, rate: float, layer: str, position: int) -> None:
        super().__init__()
        self._rate, self._position = rate, position
        self._layer = int.from_bytes(hashlib.sha256(layer.encode()).digest()[:8], "little")
        self._key = (0, 0, 0)
        self.calls = 0
        """Calls of this forward pass so far."""
        self.place = (0, 0)
        """The row of the micro-batch, and the token of that row, which the next input begins at."""

    def begin(self, seed: int, step: int, first: int) -> None:
        """Begins a forward pass of a micro-batch whose first sample has the index `first`."""
        self._key, self.calls = (seed, step, first), 0

    def forward(self, x: Tensor) -> Tensor:
        """`x[b ...]`; in training some elements are 0 and the others grow."""
        if not self.training:
            return x
        row, token = self.place
        begin = token * prod(x.shape[2:])
        rows = [self._kept(row + index, begin, x[0].numel()) for index in range(len(x))]
        self.calls += 1
        mask = torch.from_numpy(np.stack(rows)).view(x.shape)
        return x * mask.to(x.dtype) * (1 / (1 - self._rate))

    def _kept(
        self, row: int, begin: int, elements: int
    ) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
        """Which elements of a sample are kept, from one of them on."""
        seed, step, first = self._key
        sample = mixed(mixed(mixed(seed) ^ step) ^ (first + row))
        call = mixed(self._position * _MAX_CALLS + self.calls)
        key = mixed(sample ^ ((self._layer + call) % _WORD))
        places = np.arange(begin + 1, begin + elements + 1, dtype=np.uint64)
        z = places * np.uint64(_GOLDEN) + np.uint64(key)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        kept: np.ndarray[tuple[int], np.dtype[np.bool_]] = (z >> np.uint64(33)) >= round(
            self._rate * 2**31
        )
        return kept


def key_dropouts(layers: Sequence[tuple[str, nn.Module]]) -> tuple[PlainKeyedDropout, ...]:
    """Gives every `nn.Dropout` with a rate above 0 a keyed mask, in place."""
    dropouts: list[PlainKeyedDropout] = []
    for name, layer in layers:
        for position, (parent, child, rate) in enumerate(_active_dropouts(layer)):
            dropouts.append(PlainKeyedDropout(rate, name, position))
            setattr(parent, child, dropouts[-1])
    return tuple(dropouts)


def mixed(value: int) -> int:
    """SplitMix64's output for one integer."""
    return finalized((value + _GOLDEN) % _WORD)


def _active_dropouts(layer: nn.Module) -> list[tuple[nn.Module, str, float]]:
    """Parent module, name and rate of each `nn.Dropout` with a rate above 0, in order."""

    def search() -> Iterator[tuple[nn.Module, str, float]]:
        for path, module in layer.named_modules():
            if type(module) is nn.Dropout and module.p > 0:
                parent, _, child = path.rpartition(".")
                yield layer.get_submodule(parent), child, module.p

    return list(search())
