"""Adam moments in 16 and 8 bits: how an update decodes them to float32 and encodes them again.

The codec lives here so that a hardware probe times exactly what a run does.

                    bfloat16    8 bits
    first moment    nearest     sign(m) sqrt(|m| / s) in 127 steps, nearest
    second moment   dithered    (v / s)^(1/4) in 255 steps, dithered

In 8 bits s is the largest magnitude of a block of 256 elements. A second moment never has the code
0 unless its whole block is 0: Adam divides by its root, and a small value encoded as 0 would make
the update explode (Li, Chen & Zhu 2023, arXiv:2309.01507, section 4.1, the "zero-point problem").
Blocks come from Dettmers et al. 2021, arXiv:2110.02861.

Dithered: a step changes a second moment by a fraction `1 - beta2` of itself, which is less than
half a step of either format; rounding to nearest would lose it forever. So it is rounded up with a
probability equal to its distance from the value below. The noise is one table, and the offset at
which an update starts in it is a function of (seed, step, weight, part): the same however the
weights are sharded or resumed.

A value that is not finite makes its whole block so, and is detected as it would be in float32.

A float32 value between two neighbours in bfloat16 becomes the upper one with a probability equal to
its distance from the lower one, so that its expected value is the value. Steps far smaller than
half the distance of neighbours then move a weight as far as they should, on average, where rounding
to the nearest would lose them all. Sources: Gupta et al. 2015, arXiv:1502.02551; for weights in
bfloat16 Zamirai et al. 2020, arXiv:2010.06192.

The bits are exact: 16 random bits are added below the bits that bfloat16 keeps, which are then cut
off. They come from one table; where an element reads it follows from (seed, step, weight, element),
so that every layout rounds alike.
"""

import hashlib
from typing import NamedTuple, Self

import torch
from torch import Tensor

from windlass.schema import MOMENT_BLOCK, MomentFormat

PART_ELEMENTS = 2**17
"""Elements decoded at a time, a multiple of a block: the working set of an update stays in the
cache of one core."""

_FIRST_STEPS, _SECOND_STEPS = 127, 255
_TINY = 2.0**-149
"""The smallest float32 above 0; its reciprocal root is finite."""
_DTYPES: dict[MomentFormat, tuple[torch.dtype, torch.dtype]] = {
    "float32": (torch.float32, torch.float32),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "int8": (torch.int8, torch.uint8),
}


class StoredMoment(NamedTuple):
    """One moment of a weight, or of a part of it, in its storage format."""

    values: Tensor
    """float32, bfloat16, or 8-bit codes: `Int8` for a first moment, `UInt8` for a second."""
    scales: Tensor | None = None
    """`Float32[ceil(n / 256)]`, one for each block of 8-bit codes; else None."""

    @classmethod
    def zeros(
        cls, moments: MomentFormat, which: int, shape: tuple[int, ...], device: torch.device
    ) -> Self:
        """The first (`which` 0) or second (1) moment of a weight before its first update."""
        values = torch.zeros(shape, dtype=_DTYPES[moments][which], device=device)
        if moments != "int8":
            return cls(values)
        return cls(values, torch.zeros(block_count(values.numel()), device=device))

    def narrow(self, first: int, elements: int) -> Self:
        """A flat view of `elements` elements from `first` on, which must begin at a block."""
        values = self.values.view(-1)[first : first + elements]
        if self.scales is None:
            return type(self)(values)
        begin = first // MOMENT_BLOCK
        return type(self)(values, self.scales[begin : begin + block_count(elements)])


def block_count(elements: int) -> int:
    """Number of blocks, and so of scales, of so many elements."""
    return -(-elements // MOMENT_BLOCK)


def moment_dtypes(moments: MomentFormat) -> tuple[torch.dtype, torch.dtype]:
    """Storage types of the first and the second moment."""
    return _DTYPES[moments]


def dither_key(seed: int, step: int, weight: str, part_index: int) -> int:
    """Offset in the noise table at which an update starts, from 0 to `PART_ELEMENTS`.

    Args:
        part_index: index of the part among the weight's parts of `PART_ELEMENTS` elements.
    """
    text = f"{seed}/{step}/{weight}/{part_index}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % PART_ELEMENTS


class MomentCodec:
    """Decodes and encodes parts of moments; holds buffers for one part, and the noise table."""

    def __init__(self, device: torch.device) -> None:
        noise = torch.rand(2 * PART_ELEMENTS, generator=torch.Generator().manual_seed(0))
        self._noise = noise.to(device)
        self._low_bits = (noise * 2**16).to(torch.int32).to(device)
        self._one, self._two, self._work = (
            torch.empty(PART_ELEMENTS, device=device) for _ in range(3)
        )

    def decode(self, moments: tuple[StoredMoment, ...]) -> tuple[Tensor, Tensor]:
        """Both moments of one part in float32, valid until the next call; may be overwritten.

        Args:
            moments: flat, at most `PART_ELEMENTS` elements.
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

    def encode(
        self, values: tuple[Tensor, Tensor], into: tuple[StoredMoment, ...], key: int
    ) -> None:
        """Encodes both moments of one part.

        Args:
            values: float32, flat, at most `PART_ELEMENTS` elements; they may be overwritten.
        """
        first, second = into
        n = first.values.numel()
        self._load(self._one, values[0])
        self._load(self._two, values[1])
        if first.scales is None:
            first.values.copy_(self._one[:n])
        else:
            self._encode_first(n, first.values, first.scales)
        if second.scales is None:
            self._encode_bfloat16(n, second.values, key)
        else:
            self._encode_second(n, second.values, second.scales, key)

    def decode_all(self, moments: tuple[StoredMoment, ...]) -> tuple[Tensor, Tensor]:
        """Both moments of a full weight in float32, in its shape."""
        first, second = (
            torch.empty(moment.values.shape, device=self._one.device) for moment in moments
        )
        for start in range(0, first.numel(), PART_ELEMENTS):
            n = min(PART_ELEMENTS, first.numel() - start)
            one, two = self.decode((moments[0].narrow(start, n), moments[1].narrow(start, n)))
            first.view(-1)[start : start + n] = one
            second.view(-1)[start : start + n] = two
        return first, second

    def encode_all(
        self,
        values: tuple[Tensor, Tensor],
        into: tuple[StoredMoment, ...],
        *,
        seed: int,
        step: int,
        weight: str,
        first: int = 0,
    ) -> None:
        """Encodes the moments of a full weight or of a piece, as the update of `step` would.

        Args:
            values: both moments in float32.
            into: the stored moments to overwrite; not float32.
            first: first element of the piece, a multiple of `PART_ELEMENTS`.
        """
        one, two = (moment.reshape(-1) for moment in values)
        for start in range(0, one.numel(), PART_ELEMENTS):
            n = min(PART_ELEMENTS, one.numel() - start)
            key = dither_key(seed, step, weight, (first + start) // PART_ELEMENTS)
            stored = (into[0].narrow(start, n), into[1].narrow(start, n))
            self.encode((one[start : start + n], two[start : start + n]), stored, key)

    def _load(self, into: Tensor, values: Tensor) -> None:
        if values.data_ptr() != into.data_ptr():
            into[: values.numel()].copy_(values)

    def _encode_first(self, n: int, codes: Tensor, scales: Tensor) -> None:
        rows = self._rows(self._one, n)
        size = torch.abs(rows, out=self._rows(self._work, n))
        torch.amax(size, 1, out=scales)
        rows.mul_(size.clamp_min_(_TINY).rsqrt_())
        rows.mul_(_column(_or_zero(scales, _FIRST_STEPS * scales.rsqrt())))
        codes.copy_(rows.round_().view(-1)[:n])

    def _encode_second(self, n: int, codes: Tensor, scales: Tensor, key: int) -> None:
        rows = self._rows(self._two, n)
        torch.amax(rows, 1, out=scales)
        # The fourth root, also of 0: its reciprocal root is infinite, whose reciprocal root is 0.
        rows.rsqrt_().rsqrt_().mul_(
            _column(_or_zero(scales, _SECOND_STEPS * scales.sqrt().rsqrt_()))
        )
        flat = rows.view(-1)[:n].add_(self._noise[key : key + n]).floor_()
        # Conversion to signed bytes is six times as fast as to unsigned ones.
        signed = codes.view(torch.int8)
        signed.copy_(flat.clamp_(1, _SECOND_STEPS).sub_(128))
        signed.bitwise_xor_(-128)

    def _encode_bfloat16(self, n: int, into: Tensor, key: int) -> None:
        bits = self._two[:n].view(torch.int32)
        bits.add_(self._low_bits[key : key + n]).bitwise_and_(-(2**16))
        into.copy_(self._two[:n])

    def _rows(self, memory: Tensor, n: int) -> Tensor:
        """A part as `Float32[blocks, 256]`, with zeros after its last element."""
        padded = block_count(n) * MOMENT_BLOCK
        memory[n:padded] = 0
        return memory[:padded].view(-1, MOMENT_BLOCK)


def _or_zero(scales: Tensor, factors: Tensor) -> Tensor:
    return factors.masked_fill_(scales == 0, 0.0)


def _column(scales: Tensor) -> Tensor:
    return scales.unsqueeze(1)


_KEPT_BITS = -(2**16)
"""Mask of the bits of a float32 that bfloat16 has."""


class StochasticRounding:
    """Rounds updated weights."""

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
