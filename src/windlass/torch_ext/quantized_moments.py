"""Moments in 16 and 8 bits: how an update reads them as float32 and writes them back.

It stands in this room so that a probe times exactly what a run does.

                    bfloat16    8 bits
    first moment    nearest     sign(m) sqrt(|m| / s) in 127 steps, nearest
    second moment   dithered    (v / s)^(1/4) in 255 steps, dithered

In 8 bits s is the largest magnitude of a block of 256 elements. A second moment never has the code
0 unless its whole block is 0: Adam divides by its root, and a small one taken for 0 would explode
(Li, Chen & Zhu 2023, arXiv:2309.01507, section 4.1, the "zero-point problem"). Blocks come from
Dettmers et al. 2021, arXiv:2110.02861.

Dithered: a step changes a second moment by a share of `1 - beta2` of itself, which is less than
half a step of either format, and to the nearest would be lost for ever. So it is rounded up with a
chance that is its distance from below. The noise is one table, and where an update begins in it a
function of (seed, step, weight, part): the same however the weights are cut or resumed.

A number that is not finite makes its whole block so, and is found as the plain one would be.
"""

import hashlib
from typing import NamedTuple, Self

import torch
from torch import Tensor

from windlass.schema.plan import MOMENT_BLOCK, MomentFormat

PART_ELEMENTS = 2**17
"""Elements that are decoded at a time, a multiple of a block: what an update works on stays in the
cache of one core."""

_FIRST_STEPS, _SECOND_STEPS = 127, 255
_TINY = 2.0**-149
"""The smallest float32 above 0, whose reciprocal root is finite."""
_DTYPES: dict[MomentFormat, tuple[torch.dtype, torch.dtype]] = {
    "float32": (torch.float32, torch.float32),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "int8": (torch.int8, torch.uint8),
}


class StoredMoment(NamedTuple):
    """One moment of a weight, or of a part of it, as it is kept."""

    values: Tensor
    """float32, bfloat16, or codes: `Int8` of a first moment, `UInt8` of a second."""
    scales: Tensor | None = None
    """`Float32[ceil(n / 256)]`, of codes only."""

    @classmethod
    def zeros(
        cls, moments: MomentFormat, which: int, shape: tuple[int, ...], device: torch.device
    ) -> Self:
        """The first (0) or second (1) moment of a weight that had no update yet."""
        values = torch.zeros(shape, dtype=_DTYPES[moments][which], device=device)
        if moments != "int8":
            return cls(values)
        return cls(values, torch.zeros(block_count(values.numel()), device=device))

    def narrow(self, first: int, elements: int) -> Self:
        """A flat part that begins at a block."""
        values = self.values.view(-1)[first : first + elements]
        if self.scales is None:
            return type(self)(values)
        begin = first // MOMENT_BLOCK
        return type(self)(values, self.scales[begin : begin + block_count(elements)])


def block_count(elements: int) -> int:
    """How many scales so many elements have."""
    return -(-elements // MOMENT_BLOCK)


def moment_dtypes(moments: MomentFormat) -> tuple[torch.dtype, torch.dtype]:
    """What first and second moments are kept in."""
    return _DTYPES[moments]


def dither_key(seed: int, step: int, weight: str, part_index: int) -> int:
    """Where in the noise an update begins, from 0 to `PART`.

    Args:
        seed: of the run.
        step: of the update, counted from 1.
        weight: its full name.
        part: its index among the weight's parts of `PART` elements.
    """
    digest = hashlib.blake2b(f"{seed}/{step}/{weight}/{part_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % PART_ELEMENTS


class MomentCodec:
    """Decodes and encodes parts of moments; holds what one part needs, and the noise.

    Args:
        device: where the moments are.
    """

    def __init__(self, device: torch.device) -> None:
        noise = torch.rand(2 * PART_ELEMENTS, generator=torch.Generator().manual_seed(0))
        self._noise = noise.to(device)
        self._low_bits = (noise * 2**16).to(torch.int32).to(device)
        self._one, self._two, self._work = (torch.empty(PART_ELEMENTS, device=device) for _ in range(3))

    def decode(self, moments: tuple[StoredMoment, StoredMoment]) -> tuple[Tensor, Tensor]:
        """Both moments of one part in float32, valid until the next call; may be changed.

        Args:
            moments: of at most `PART` elements, flat.
        """
        first, second = moments
        n = first.values.numel()
        one, two = self._one[:n], self._two[:n]
        one.copy_(first.values)
        two.copy_(second.values)
        if first.scales is not None:
            rows = self._rows(self._one, n)
            size = torch.abs(rows, out=self._rows(self._work, n))
            rows.mul_(size).mul_(_column(first.scales / _FIRST_STEPS**2))
        if second.scales is not None:
            root = second.scales.sqrt().div_(_SECOND_STEPS**2)
            self._rows(self._two, n).square_().mul_(_column(root)).square_()
        return one, two

    def encode(self, values: tuple[Tensor, Tensor], into: tuple[StoredMoment, StoredMoment], key: int) -> None:
        """Writes one part back.

        Args:
            values: float32, of at most `PART` elements, flat; they are not kept.
            into: where to.
            key: from `dither_key`.
        """
        first, second = into
        n = first.values.numel()
        self._take(self._one, values[0])
        self._take(self._two, values[1])
        if first.scales is None:
            first.values.copy_(self._one[:n])
        else:
            self._first(n, first.values, first.scales)
        if second.scales is None:
            self._halve(n, second.values, key)
        else:
            self._second(n, second.values, second.scales, key)

    def decode_all(self, moments: tuple[StoredMoment, StoredMoment]) -> tuple[Tensor, Tensor]:
        """Both moments of a whole weight in float32, in its shape."""
        first, second = (
            torch.empty(kept.values.shape, device=self._one.device) for kept in moments
        )
        for at in range(0, first.numel(), PART_ELEMENTS):
            n = min(PART_ELEMENTS, first.numel() - at)
            one, two = self.decode((moments[0].narrow(at, n), moments[1].narrow(at, n)))
            first.view(-1)[at : at + n] = one
            second.view(-1)[at : at + n] = two
        return first, second

    def encode_all(
        self,
        values: tuple[Tensor, Tensor],
        into: tuple[StoredMoment, StoredMoment],
        *,
        seed: int,
        step: int,
        weight: str,
        first: int = 0,
    ) -> None:
        """Writes a piece of a weight of any size, or all of it, as the update of `step` would.

        Args:
            values: float32.
            into: where to; not float32.
            seed: of the run.
            step: counted from 1.
            weight: its full name.
            first: element at which the piece begins, a multiple of `PART`.
        """
        one, two = (each.reshape(-1) for each in values)
        for at in range(0, one.numel(), PART_ELEMENTS):
            n = min(PART_ELEMENTS, one.numel() - at)
            key = dither_key(seed, step, weight, (first + at) // PART_ELEMENTS)
            kept = (into[0].narrow(at, n), into[1].narrow(at, n))
            self.encode((one[at : at + n], two[at : at + n]), kept, key)

    def _take(self, into: Tensor, values: Tensor) -> None:
        if values.data_ptr() != into.data_ptr():
            into[: values.numel()].copy_(values)

    def _first(self, n: int, codes: Tensor, scales: Tensor) -> None:
        rows = self._rows(self._one, n)
        size = torch.abs(rows, out=self._rows(self._work, n))
        torch.amax(size, 1, out=scales)
        rows.mul_(size.clamp_min_(_TINY).rsqrt_())
        rows.mul_(_column(_or_zero(scales, _FIRST_STEPS * scales.rsqrt())))
        codes.copy_(rows.round_().view(-1)[:n])

    def _second(self, n: int, codes: Tensor, scales: Tensor, key: int) -> None:
        rows = self._rows(self._two, n)
        torch.amax(rows, 1, out=scales)
        # The fourth root, of 0 as well: its reciprocal root is infinite, and that one's is 0.
        rows.rsqrt_().rsqrt_().mul_(
            _column(_or_zero(scales, _SECOND_STEPS * scales.sqrt().rsqrt_()))
        )
        flat = rows.view(-1)[:n].add_(self._noise[key : key + n]).floor_()
        # Numbers turn into signed bytes six times as fast as into unsigned ones.
        signed = codes.view(torch.int8)
        signed.copy_(flat.clamp_(1, _SECOND_STEPS).sub_(128))
        signed.bitwise_xor_(-128)

    def _halve(self, n: int, into: Tensor, key: int) -> None:
        bits = self._two[:n].view(torch.int32)
        bits.add_(self._low_bits[key : key + n]).bitwise_and_(-(2**16))
        into.copy_(self._two[:n])

    def _rows(self, memory: Tensor, n: int) -> Tensor:
        """`Float32[blocks, 256]` of a part, zeros behind its last element."""
        whole = block_count(n) * MOMENT_BLOCK
        memory[n:whole] = 0
        return memory[:whole].view(-1, MOMENT_BLOCK)


def _or_zero(scales: Tensor, factors: Tensor) -> Tensor:
    return factors.masked_fill_(scales == 0, 0.0)


def _column(scales: Tensor) -> Tensor:
    return scales.unsqueeze(1)
