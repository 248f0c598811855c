"""The device memory that offloaded state passes through, part by part."""

import torch
from torch import Tensor

from windlass.program import STAGING_BYTES
from windlass.runtime.offload.direct_io import page_aligned_buffer
from windlass.schema import Plan
from windlass.torch_ext import PART_ELEMENTS, Device

_SETS = 3
"""Parts in flight: one is read, one updated, one written."""
_PLACES = {"weight": (0, 0.0), "moment1": (1, 0.0), "moment2": (2, 0.0), "scale1": (1, 0.5),
           "scale2": (2, 0.5), "average": (4, 0.0)}  # fmt: skip
"""Index of the buffer of a set, and place in it, for each kind of region. Scales stand in the
second half of the buffer of their codes, which take a quarter of it."""
GRADIENT_BUFFER = 3
"""Index of the buffer of gradients."""


class StagingBuffers:
    """Buffers for the parts in flight, shared by all layers.

    Args:
        device: the device that updates.
        plan: whether averages are kept.
    """

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
