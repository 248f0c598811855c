"""Host memory that is allocated and pinned once, and freed at the end of the run.

An accelerator copies at full speed, and in parallel with its computation, only from and to pinned
memory. Pinning is slow, so it is done once for everything that will ever be stored there. torch's
own pinned memory is rounded up to a power of two, which is not affordable for hundreds of GiB; so
plain memory is mapped, and registered as it is.
"""

import mmap

import torch
from torch import Tensor

from windlass.torch_ext.device import Device


class PinnedMemory:
    """Page-aligned host memory, initially zero; `close` frees it.

    Args:
        nbytes: size in bytes.
        device: the device whose copies it is pinned for; for a CPU it is not pinned.

    Raises:
        OSError: the host does not have so much memory.
        RuntimeError: the memory cannot be pinned.
    """

    def __init__(self, nbytes: int, device: Device) -> None:
        # Not from torch: its CPU allocator is limited to the device memory of the plan.
        pages = -(-max(1, nbytes) // mmap.PAGESIZE)
        self._map = mmap.mmap(-1, pages * mmap.PAGESIZE)
        self.buffer: Tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        """`UInt8[nbytes]`, rounded up to a page."""
        self._device = device
        if device.has_pinned_memory:
            device.register_host_memory(self.buffer)

    def close(self) -> None:
        """Unpins the memory; it is freed once no tensor refers to it."""
        if self._device.has_pinned_memory and self.buffer.numel():
            self._device.unregister_host_memory(self.buffer)
        self.buffer = torch.empty(0, dtype=torch.uint8)
