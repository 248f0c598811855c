"""The file of one layer whose state lies beyond the near tier, byte by byte.

It is a checkpoint's file as it is. Every tensor begins at a page and is followed by zeros up to the
next one, so that it can be read and written directly. In the safetensors format, which allows no
gaps, the zeros have names of their own. So a checkpoint takes the file by a second name, and copies
nothing; where the state lies in memory, its bytes are the file's.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from windlass.runtime.checkpoint.safetensors_io import DTYPE_NAMES, tensor_bytes
from windlass.runtime.offload.backing_store import StoreHandle
from windlass.runtime.offload.direct_io import PAGE_BYTES, round_up_to_page, page_aligned_buffer
from windlass.schema.plan import MOMENT_BLOCK, MomentFormat
from windlass.torch_ext.quantized_moments import block_count, moment_dtypes

_HEADER_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class TensorExtent:
    """Where one weight's numbers lie in a region."""

    name: str
    shape: tuple[int, ...]
    offset: int
    """In bytes, a multiple of a page."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class TensorRegion:
    """One number for each element of a layer's own weights, weight after weight."""

    dtype: torch.dtype
    slices: tuple[TensorExtent, ...]
    nbytes: int

    def views(self, memory: Tensor) -> tuple[Tensor, ...]:
        """The weights in memory that holds the whole region, `UInt8[nbytes]`."""
        return tuple(
            memory[part.offset : part.offset + part.nbytes].view(self.dtype).view(part.shape)
            for part in self.slices
        )


def region(weights: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> TensorRegion:
    """The region of weights with these names and shapes."""
    slices: list[TensorExtent] = []
    offset = 0
    for name, shape in weights.items():
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        slices.append(TensorExtent(name, shape, offset, nbytes))
        offset += round_up_to_page(nbytes)
    return TensorRegion(dtype, tuple(slices), offset)


@dataclass(frozen=True, slots=True)
class StateRegion:
    """A region of a layer's safetensors file."""

    kind: str
    """`weight`, `moment1`, `moment2`, `scale1`, `scale2`."""
    region: TensorRegion
    offset: int
    """Of the region in the file."""
    each: int
    """Elements of the weight that share one of its numbers."""

    def spot(self, weight: int, first: int, elements: int) -> tuple[int, int]:
        """Offset in the file, and bytes, of a part of one weight.

        Args:
            weight: index of it.
            first: element, such that what it has here begins at a page.
            elements: of the part.
        """
        size = self.region.dtype.itemsize
        begin = self.offset + self.region.slices[weight].offset + size * (first // self.each)
        return begin, size * -(-elements // self.each)


_SCALES = ("scale1", "scale2")


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Where everything lies in a layer's safetensors file."""

    header: bytes
    """Padded to whole pages; what follows begins there."""
    places: tuple[StateRegion, ...]
    """Masters, first moments, second moments, and the scales of either where there are."""
    steps: int
    """Offset of the counts of updates, one float32 for each weight."""
    nbytes: int

    @property
    def masters(self) -> TensorRegion:
        """The region of the masters."""
        return self.places[0].region


def state_layout(
    weights: Mapping[str, tuple[int, ...]],
    buffers: Sequence[tuple[str, Tensor]],
    moments: MomentFormat = "float32",
) -> StateLayout:
    """The layout of a layer that owns these weights.

    Args:
        weights: names and shapes, in the layer's order.
        buffers: that belong to a checkpoint.
        moments: how they are kept.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    begins: list[tuple[str, TensorRegion, int]] = []
    for kind, each in _regions(weights, moments):
        begins.append((kind, each, offset))
        for part in each.slices:
            end = offset + part.nbytes
            entries[f"{kind}/{part.name}"] = _entry(
                DTYPE_NAMES[each.dtype], part.shape, offset, end
            )
            offset = _padded(entries, end)
    steps = offset
    for name in weights:
        entries[f"steps/{name}"] = _entry("F32", (), offset, offset + 4)
        offset += 4
    for name, buffer in buffers:
        end = offset + buffer.numel() * buffer.element_size()
        shape = tuple(buffer.shape)
        entries[f"buffer/{name}"] = _entry(DTYPE_NAMES[buffer.dtype], shape, offset, end)
        offset = end
    nbytes = _padded(entries, offset)
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + _HEADER_LENGTH_BYTES) % PAGE_BYTES)
    header = len(text).to_bytes(_HEADER_LENGTH_BYTES, "little") + text
    places = tuple(
        StateRegion(kind, each, len(header) + begin, MOMENT_BLOCK if kind in _SCALES else 1)
        for kind, each, begin in begins
    )
    return StateLayout(header, places, len(header) + steps, len(header) + nbytes)


def _regions(
    weights: Mapping[str, tuple[int, ...]], moments: MomentFormat
) -> Iterator[tuple[str, TensorRegion]]:
    """What the file begins with, in its order."""
    one, two = moment_dtypes(moments)
    for kind, dtype in (("weight", torch.float32), ("moment1", one), ("moment2", two)):
        yield kind, region(weights, dtype)
    if moments == "int8":
        scales = {name: (block_count(torch.Size(shape).numel()),) for name, shape in weights.items()}
        for kind in _SCALES:
            yield kind, region(scales, torch.float32)


def write_tail(
    file: StoreHandle, layout: StateLayout, updates: Sequence[int], buffers: Sequence[Tensor]
) -> None:
    """Writes the header, the counts of updates and the buffers of a state file.

    Args:
        file: the state's, open.
        layout: of the file.
        updates: of each weight.
        buffers: that belong to a checkpoint.
    """
    counts = torch.tensor(updates, dtype=torch.float32).numpy().tobytes()
    tail = counts + b"".join(bytes(tensor_bytes(buffer)) for buffer in buffers)
    for offset, content in ((0, layout.header), (layout.steps, tail)):
        memory = page_aligned_buffer(round_up_to_page(len(content)))
        memory.zero_()
        memory[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        file.write(memory, offset)


def _entry(dtype: str, shape: tuple[int, ...], start: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


def _padded(entries: dict[str, object], offset: int) -> int:
    """The next page, with an entry for the zeros before it."""
    end = round_up_to_page(offset)
    if end > offset:
        entries[f"zeros/{offset}"] = _entry("U8", (end - offset,), offset, end)
    return end
