"""The device memory that offloaded state passes through, part by part, and what updates a part."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from windlass.program import STAGING_BYTES
from windlass.runtime.offload.direct_io import page_aligned_buffer, round_up_to_page
from windlass.runtime.offload.state_layout import StateLayout
from windlass.runtime.optimizers.updates import Chunk
from windlass.schema import Plan
from windlass.torch_ext import PART_ELEMENTS, Device, StoredMoment

UpdatePass = Callable[[Chunk], None]
"""One pass of an optimizer step, for a part of one parameter, in place."""
_SETS = 3
"""Parts in flight: one is read, one updated, one written."""
_PLACES = {"weight": (0, 0.0), "moment1": (1, 0.0), "moment2": (2, 0.0), "scale1": (1, 0.5),
           "scale2": (2, 0.5), "average": (4, 0.0)}  # fmt: skip
"""Index of the buffer of a set, and place in it, for each kind of region. Scales stand in the
second half of the buffer of their codes, which take a quarter of it."""
GRADIENT_BUFFER = 3
"""Index of the buffer of gradients."""


class StagingBuffers:
    """Buffers for the parts in flight, shared by all layers."""

    def __init__(self, device: Device, plan: Plan) -> None:
        nbytes = _buffer_bytes(plan)
        self.sets = [
            [page_aligned_buffer(nbytes, device) for _ in range(_buffers(plan))]
            for _ in range(_SETS)
        ]
        """For each part in flight: masters, first and second moments, gradient, and averages if
        there are any."""
        self.converted = page_aligned_buffer(nbytes, device).view(torch.float32)
        """A gradient converted to float32."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerUpdate:
    """One optimizer step for a layer, as the store asks for it."""

    passes: Sequence[UpdatePass]
    """The optimizer: one pass over all parts, or several."""
    reads_gradient: Sequence[bool]
    """Whether each pass reads gradients."""
    weights: Sequence[Tensor]
    """The copies of the weights that the layer computes with; overwritten by the update."""
    gradients: Sequence[Tensor | None] | None
    """The gradient of each weight; None if `write_grads` has offloaded them."""
    has_gradient: Sequence[bool]
    """Whether each weight has a gradient."""
    working_memory: Tensor | None
    """The buffer that holds `weights`, to be written back; None if they stay in device memory."""


class Part(NamedTuple):
    """A part of one weight."""

    weight: int
    """Index of the weight."""
    first: int
    """First element of the part."""
    elements: int

    def of(self, tensor: Tensor) -> Tensor:
        """These elements of a full weight or gradient, `[elements]`."""
        return tensor.reshape(-1)[self.first : self.first + self.elements]


class PartViews(NamedTuple):
    """What is kept of a part."""

    master: Tensor
    moments: tuple[StoredMoment, ...]
    average: Tensor | None


class StateParts:
    """The parts of one layer's state, and where each stands in the file and in the buffers."""

    def __init__(self, layout: StateLayout, elements: int) -> None:
        self._layout, self._elements = layout, elements

    def __iter__(self) -> Iterator[Part]:
        """All parts, weight after weight."""
        for index, extent in enumerate(self._layout.masters.extents):
            elements = extent.nbytes // self._layout.masters.dtype.itemsize
            for first in range(0, elements, self._elements):
                yield Part(index, first, min(self._elements, elements - first))

    def byte_ranges(self, buffers: list[Tensor], part: Part) -> Iterator[tuple[Tensor, int]]:
        """The buffer of each region of a part, and its offset in the file."""
        for region in self._layout.regions:
            offset, nbytes = region.byte_range(part.weight, part.first, part.elements)
            if not nbytes:
                continue
            yield region_buffer(buffers, region.kind)[: round_up_to_page(nbytes)], offset

    def views(self, buffers: list[Tensor], part: Part) -> PartViews:
        """What is kept of a part, as views into the buffers."""
        views: dict[str, Tensor] = {}
        for region in self._layout.regions:
            _, nbytes = region.byte_range(part.weight, part.first, part.elements)
            memory = region_buffer(buffers, region.kind)[:nbytes]
            views[region.kind] = memory.view(region.region.dtype)
        moments = tuple(
            StoredMoment(views[name], views.get(name.replace("moment", "scale")))
            for name in ("moment1", "moment2")
            if name in views
        )
        return PartViews(views["weight"], moments, views.get("average"))


def part_elements(plan: Plan) -> int:
    """Elements of a part, a multiple of the moment codec's parts.

    So no block straddles two parts, and all values of a part begin at a page.
    """
    return _buffer_bytes(plan) // 4


def region_buffer(buffers: list[Tensor], kind: str) -> Tensor:
    """The memory of a set of buffers that a kind of region passes through, `UInt8[n]`."""
    index, place = _PLACES[kind]
    return buffers[index][int(place * len(buffers[index])) :]


def _buffers(plan: Plan) -> int:
    """Buffers of a set."""
    return GRADIENT_BUFFER + 1 + (plan.ema is not None)


def _buffer_bytes(plan: Plan) -> int:
    """Size of each buffer; one more than those of all sets converts gradients to float32."""
    part_bytes = 4 * PART_ELEMENTS
    return STAGING_BYTES // (_buffers(plan) * _SETS + 1) // part_bytes * part_bytes
