"""The parts in which a layer's offloaded state passes through the staging buffers."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from windlass.runtime.offload.direct_io import round_up_to_page
from windlass.runtime.offload.staging_buffers import region_buffer
from windlass.runtime.offload.state_layout import StateLayout
from windlass.torch_ext import StoredMoment


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
    """The parts of one layer's state, and where each stands in the file and in the buffers.

    Args:
        layout: layout of the file.
        elements: most elements of a part.
    """

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
