"""Host memory that is allocated and pinned once, and freed at the end of the run.

An accelerator copies at full speed, and in parallel with its computation, only from and to pinned
memory. Pinning is slow, so it is done once for everything that will ever be stored there. torch's
own pinned memory is rounded up to a power of two, which is not affordable for hundreds of GiB; so
plain memory is mapped, and registered as it is.
"""

import mmap

import torch
from torch import Tensor

from windlass.runtime.offload.direct_io import round_up_to_page


class PinnedMemory:
    """Page-aligned host memory, initially zero; `close` frees it.

    Args:
        nbytes: size in bytes.
        device: the device whose copies it is pinned for; for a CPU it is not pinned.

    Raises:
        OSError: the host does not have so much memory.
        RuntimeError: the memory cannot be pinned.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        # Not from torch: its CPU allocator is limited to the device memory of the plan.
        self._map = mmap.mmap(-1, round_up_to_page(max(1, nbytes)))
        self.buffer: Tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        """`UInt8[nbytes]`, rounded up to a page."""
        self._pinned = device.type == "cuda"
        if self._pinned:
            runtime = torch.cuda.cudart()
            address, length = self.buffer.data_ptr(), self.buffer.numel()
            torch.cuda.check_error(int(runtime.cudaHostRegister(address, length, 0)))

    def close(self) -> None:
        """Unpins the memory; it is freed once no tensor refers to it."""
        if self._pinned:
            self._pinned = False
            runtime = torch.cuda.cudart()
            torch.cuda.check_error(int(runtime.cudaHostUnregister(self.buffer.data_ptr())))
        self.buffer = torch.empty(0, dtype=torch.uint8)
