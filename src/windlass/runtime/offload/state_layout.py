"""The byte layout of the file that holds one layer's offloaded state.

The file is also a valid checkpoint file. Every tensor begins at a page and is followed by zeros up
to the next page, so that it can be read and written with direct I/O. The safetensors format allows
no gaps, so the zeros have names of their own. A checkpoint can therefore take the file as a hard
link without copying; a state in host memory has the same bytes.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from windlass.runtime.checkpoint.layer_tensors import PADDING
from windlass.runtime.checkpoint.safetensors_io import DTYPE_NAMES, tensor_bytes
from windlass.runtime.offload.backing_store import StoreHandle
from windlass.runtime.offload.direct_io import PAGE_BYTES, page_aligned_buffer, round_up_to_page
from windlass.runtime.optimizer_state.optimizer_state import StateFormat
from windlass.schema import MOMENT_BLOCK
from windlass.torch_ext import block_count, moment_dtypes

_HEADER_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class TensorExtent:
    """Position of one weight's values in a region."""

    name: str
    shape: tuple[int, ...]
    offset: int
    """In bytes, a multiple of a page."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class TensorRegion:
    """One value for each element of a layer's own weights, weight after weight."""

    dtype: torch.dtype
    extents: tuple[TensorExtent, ...]
    nbytes: int

    def views(self, memory: Tensor) -> tuple[Tensor, ...]:
        """The tensors of a buffer that holds the whole region, `UInt8[nbytes]`."""
        return tuple(
            memory[extent.offset : extent.offset + extent.nbytes]
            .view(self.dtype)
            .view(extent.shape)
            for extent in self.extents
        )


def tensor_region(weights: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> TensorRegion:
    """The region of weights with these names and shapes."""
    extents: list[TensorExtent] = []
    offset = 0
    for name, shape in weights.items():
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        extents.append(TensorExtent(name, shape, offset, nbytes))
        offset += round_up_to_page(nbytes)
    return TensorRegion(dtype, tuple(extents), offset)


@dataclass(frozen=True, slots=True)
class StateRegion:
    """A region of a layer's safetensors file."""

    kind: str
    """`weight`, `moment1`, `moment2`, `scale1`, `scale2` or `average`."""
    region: TensorRegion
    offset: int
    """Position of the region in the file, in bytes."""
    elements_per_value: int
    """Elements of the weight that share one value of the region."""

    def byte_range(self, weight: int, first: int, elements: int) -> tuple[int, int]:
        """Offset in the file, and size in bytes, of a part of one weight.

        Args:
            first: first element of the part; its value must begin at a page.
        """
        size = self.region.dtype.itemsize
        begin = self.offset + self.region.extents[weight].offset
        if not self.region.extents[weight].nbytes:
            return begin, 0
        begin += size * (first // self.elements_per_value)
        return begin, size * -(-elements // self.elements_per_value)


_SCALES = ("scale1", "scale2")


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Positions of everything in a layer's safetensors file."""

    header: bytes
    """The safetensors header, padded to whole pages; the data follows it."""
    regions: tuple[StateRegion, ...]
    """Masters, first moments, then second moments, scales and averages, if there are any."""
    steps_offset: int
    """Offset of the update counts, one float32 per weight."""
    nbytes: int
    """Size of the file."""

    @property
    def masters(self) -> TensorRegion:
        """The region of the master weights."""
        return self.regions[0].region


def state_layout(
    weights: Mapping[str, tuple[int, ...]],
    tail: Sequence[tuple[str, Tensor]],
    state: StateFormat,
    masters: torch.dtype,
) -> StateLayout:
    """The layout of a layer that owns these weights."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    begins: list[tuple[str, TensorRegion, int]] = []
    for kind, region in _regions(weights, state, masters):
        begins.append((kind, region, offset))
        for extent in region.extents:
            if not extent.nbytes:
                continue
            end = offset + extent.nbytes
            entries[f"{kind}/{extent.name}"] = _entry(
                DTYPE_NAMES[region.dtype], extent.shape, offset, end
            )
            offset = _pad_to_page(entries, end)
    steps_offset = offset
    for name in weights:
        entries[f"steps/{name}"] = _entry("F32", (), offset, offset + 4)
        offset += 4
    for key, tensor in tail:
        end = offset + tensor.numel() * tensor.element_size()
        entries[key] = _entry(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), offset, end)
        offset = end
    nbytes = _pad_to_page(entries, offset)
    header = _header(entries)
    regions = tuple(
        StateRegion(kind, region, len(header) + begin, MOMENT_BLOCK if kind in _SCALES else 1)
        for kind, region, begin in begins
    )
    return StateLayout(header, regions, len(header) + steps_offset, len(header) + nbytes)


@dataclass(frozen=True, slots=True)
class FrozenLayout:
    """Positions of everything in a safetensors file of weights alone."""

    header: bytes
    """Padded to whole pages; the weights follow it."""
    region: TensorRegion

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return len(self.header) + self.region.nbytes


def frozen_layout(weights: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> FrozenLayout:
    """The layout of a file of weights with these names and shapes."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    region = tensor_region(weights, dtype)
    for extent in region.extents:
        end = extent.offset + extent.nbytes
        entries[f"weight/{extent.name}"] = _entry(
            DTYPE_NAMES[dtype], extent.shape, extent.offset, end
        )
        _pad_to_page(entries, end)
    return FrozenLayout(_header(entries), region)


def _regions(
    weights: Mapping[str, tuple[int, ...]], state: StateFormat, masters: torch.dtype
) -> Iterator[tuple[str, TensorRegion]]:
    """The regions at the start of the file, in order, with their kinds."""
    yield "weight", tensor_region(weights, masters)
    factored = {name for name, shape in weights.items() if state.law.factors(shape)}
    kept = {name: (0,) if name in factored else shape for name, shape in weights.items()}
    for which, dtype in enumerate(moment_dtypes(state.moments)[: state.law.moments], start=1):
        yield f"moment{which}", tensor_region(kept, dtype)
    if state.moments == "int8":
        scales = {
            name: (block_count(torch.Size(shape).numel()),) for name, shape in weights.items()
        }
        for kind in _SCALES:
            yield kind, tensor_region(scales, torch.float32)
    if state.average:
        yield "average", tensor_region(weights, torch.float32)


def write_tail(
    file: StoreHandle, layout: StateLayout, updates: Sequence[int], tensors: Sequence[Tensor]
) -> None:
    """Writes the header, the update counts and what follows them in a state file."""
    counts = torch.tensor(updates, dtype=torch.float32).numpy().tobytes()
    tail = counts + b"".join(bytes(tensor_bytes(each)) for each in tensors)
    write_bytes(file, layout.header, 0)
    write_bytes(file, tail, layout.steps_offset)


def write_bytes(file: StoreHandle, content: bytes, offset: int) -> None:
    """Writes bytes from a page on, and zeros behind them up to the next one."""
    if not content:  # a layer without trained weights has no tail
        return
    memory = page_aligned_buffer(round_up_to_page(len(content)))
    memory.zero_()
    memory[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    file.write(memory, offset)


def _header(entries: Mapping[str, object]) -> bytes:
    """The header of a file, padded to whole pages."""
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + _HEADER_LENGTH_BYTES) % PAGE_BYTES)
    return len(text).to_bytes(_HEADER_LENGTH_BYTES, "little") + text


def _entry(dtype: str, shape: tuple[int, ...], start: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


def _pad_to_page(entries: dict[str, object], offset: int) -> int:
    """The start of the next page; adds an entry for the zeros before it."""
    end = round_up_to_page(offset)
    if end > offset:
        entries[f"{PADDING}{offset}"] = _entry("U8", (end - offset,), offset, end)
    return end
