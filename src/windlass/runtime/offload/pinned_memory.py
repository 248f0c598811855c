"""Memory of the host that is taken once and given back at the end.

An accelerator copies at full speed, and beside its computing, only from and to memory that is
pinned. Pinning takes long, so it is done once for all that will ever lie there. Torch's own pinned
memory is rounded up to a power of two, which for hundreds of GiB nobody can afford; so plain memory
is mapped, and registered as it is.
"""

import mmap

import torch
from torch import Tensor

from windlass.runtime.offload.direct_io import round_up_to_page


class PinnedMemory:
    """Bytes that begin at a page, zeros at first; `close` gives them back.

    Args:
        nbytes: how many.
        device: whose copies they are pinned for; on a CPU they are as they are.

    Raises:
        OSError: the host has no such room.
        RuntimeError: they cannot be pinned.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        # Not from torch: on a CPU its memory is held to the limit of the near tier.
        self._map = mmap.mmap(-1, round_up_to_page(max(1, nbytes)))
        self.bytes: Tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self._pinned = device.type == "cuda"
        if self._pinned:
            runtime = torch.cuda.cudart()
            address, length = self.bytes.data_ptr(), self.bytes.numel()
            torch.cuda.check_error(int(runtime.cudaHostRegister(address, length, 0)))

    def close(self) -> None:
        """Unpins them; they are free once no tensor looks at them."""
        if self._pinned:
            self._pinned = False
            runtime = torch.cuda.cudart()
            torch.cuda.check_error(int(runtime.cudaHostUnregister(self.bytes.data_ptr())))
        self.bytes = torch.empty(0, dtype=torch.uint8)
