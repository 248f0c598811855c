"""Stochastic rounding of weights to bfloat16.

A float32 value between two neighbours in bfloat16 becomes the upper one with a probability equal to
its distance from the lower one, so that its expected value is the value. Steps far smaller than
half the distance of neighbours then move a weight as far as they should, on average, where rounding
to the nearest would lose them all. Sources: Gupta et al. 2015, arXiv:1502.02551; for weights in
bfloat16 Zamirai et al. 2020, arXiv:2010.06192.

The bits are exact: 16 random bits are added below the bits that bfloat16 keeps, which are then cut
off. They come from one table; where an element reads it follows from (seed, step, weight, element),
so that every layout rounds alike.
"""

import torch
from torch import Tensor

from windlass.torch_ext.quantized_moments import PART_ELEMENTS, dither_key

_KEPT_BITS = -(2**16)
"""Mask of the bits of a float32 that bfloat16 has."""


class StochasticRounding:
    """Rounds updated weights.

    Args:
        device: device of the weights.
        seed: seed of the run.
    """

    def __init__(self, device: torch.device, seed: int) -> None:
        self._seed = seed
        draws = torch.Generator().manual_seed(1)
        bits = torch.randint(2**16, (2 * PART_ELEMENTS,), generator=draws, dtype=torch.int32)
        self._bits = bits.to(device)
        """`Int32[n]`: 16 random bits each."""

    def round(self, values: Tensor, into: Tensor, *, step: int, weight: str, first: int) -> None:
        """Rounds a piece of a weight.

        Args:
            values: `Float32[n]`, which are overwritten.
            into: `BFloat16[n]`.
            step: step of the update, counted from 1.
            weight: full name of the weight.
            first: the piece's first element in the weight.
        """
        bits, done = values.view(torch.int32), 0
        while done < len(values):
            part, within = divmod(first + done, PART_ELEMENTS)
            count = min(PART_ELEMENTS - within, len(values) - done)
            begin = within + dither_key(self._seed, step, f"{weight}/weight", part)
            bits[done : done + count].add_(self._bits[begin : begin + count])
            done += count
        bits.bitwise_and_(_KEPT_BITS)
        into.copy_(values)
