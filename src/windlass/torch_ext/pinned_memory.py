"""Host memory that is allocated and pinned once, and freed at the end of the run.

An accelerator copies at full speed, and in parallel with its computation, only from and to pinned
memory. Pinning is slow, so it is done once for everything that will ever be stored there. torch's
own pinned memory is rounded up to a power of two, which is not affordable for hundreds of GiB; so
plain memory is mapped, and registered as it is.

The memory is private, whose pages the system gives in half the time of shared ones. A process that
is forked off has none of it: after a fork this process would write to other pages than those that
the driver has pinned.
"""

import mmap

import torch
from torch import Tensor

from windlass.torch_ext.device import Device


class PinnedMemory:
    """Page-aligned host memory, initially zero; `close` frees it.

    Args:
        device: the device whose copies it is pinned for; for a CPU it is not pinned.

    Raises:
        OSError: the host does not have so much memory.
        RuntimeError: the memory cannot be pinned.
    """

    def __init__(self, nbytes: int, device: Device) -> None:
        # Not from torch: its CPU allocator is limited to the device memory of the plan.
        self._map = _map_memory(max(1, nbytes))
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


def _map_memory(nbytes: int) -> mmap.mmap:
    """Whole pages of new memory."""
    size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return mmap.mmap(-1, size)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_DONTFORK"):
        memory.madvise(mmap.MADV_DONTFORK)
    return memory
