"""The kinds of devices: what is different on a CPU, a GPU of NVIDIA or AMD, and one of Apple."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import psutil  # type: ignore[import-untyped]
import torch
from torch import Tensor

from windlass.torch_ext.device import Device
from windlass.torch_ext.process_memory import (
    peak_resident_bytes,
    reset_peak_resident,
    resident_bytes,
)
from windlass.torch_ext.streams import Event, HostEvent, HostStream, RecordedWork, Stream

_UNRESTRICTED = 64
"""Number of devices that torch takes to be visible where no variable restricts them."""


class CpuDevice(Device):
    """The CPU, which has done all work when a call returns."""

    is_asynchronous = False
    has_pinned_memory = False
    piece_elements = 2**21
    """A piece of 8 MiB stays in the shared cache: on 2 cores of a Zen 4 the update of 38.6 M
    weights in bfloat16 takes 50 ms this way, and 110 ms in one piece. Pieces of 2 MiB take 40 ms,
    but the threads synchronise at the end of each, which costs up to 40 times as much on a machine
    that others use too."""

    def count(self) -> int:
        """One."""
        return 1

    def activate(self) -> None:
        """Does nothing: all threads compute on it."""

    def new_stream(self) -> Stream:
        """A stream that has no work."""
        return HostStream()

    def new_event(self, *, timing: bool = False) -> Event:
        """An event that has occurred when it is recorded."""
        del timing
        return HostEvent()

    def current_stream(self) -> Stream:
        """A stream that has no work."""
        return HostStream()

    def use_stream(self, stream: Stream) -> AbstractContextManager[object]:
        """Does nothing."""
        del stream
        return nullcontext()

    def synchronize(self) -> None:
        """Does nothing."""

    def memory_allocated(self) -> int:
        """Resident memory of the process in bytes."""
        return resident_bytes()

    def peak_memory(self) -> int:
        """Peak resident memory of the process in bytes."""
        return peak_resident_bytes()

    def reset_peak_memory(self) -> bool:
        """Begins a new peak; False if the system does not permit it."""
        return reset_peak_resident()

    def memory_reserved(self) -> int:
        """Resident memory of the process in bytes."""
        return resident_bytes()

    def free_memory(self) -> int:
        """Host memory that processes may still take, in bytes."""
        return int(psutil.virtual_memory().available)

    def total_memory(self) -> int:
        """Host memory in bytes."""
        return int(psutil.virtual_memory().total)

    def to_device(self, tensor: Tensor, *, into: Tensor | None = None) -> Tensor:
        """The tensor itself, or `into` with its values."""
        return tensor if into is None else into.copy_(tensor)

    def default_generator(self) -> torch.Generator:
        """Torch's default generator."""
        return torch.default_generator


class CudaDevice(Device):
    """A GPU of NVIDIA, or of AMD under ROCm, whose torch has the same names."""

    can_record = True

    def visible_indices(self) -> tuple[int, ...] | None:
        """The numbers in `CUDA_VISIBLE_DEVICES` or its like; none if they are UUIDs.

        The driver counts GPUs by PCI address, and so does CUDA where all are of one model.
        """
        visible = torch.cuda._parse_visible_devices()  # noqa: SLF001  it has no public name
        if len(visible) >= _UNRESTRICTED:
            return None
        return tuple(index for index in visible if isinstance(index, int))

    def has_bfloat16(self) -> bool:
        """Whether it has, which NVIDIA's have since Ampere; not a V100, T4 or RTX 2080."""
        with torch.cuda.device(self.torch_device):
            return bool(torch.cuda.is_bf16_supported(including_emulation=False))

    def has_tf32(self) -> bool:
        """Whether it has, which NVIDIA's have since Ampere."""
        with torch.cuda.device(self.torch_device):
            return bool(torch.cuda.is_tf32_supported())

    def register_host_memory(self, buffer: Tensor) -> None:
        """Pins host memory, as it is; torch's own pinned memory is rounded to a power of two."""
        code = self._runtime().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)
        torch.cuda.check_error(int(code))

    def unregister_host_memory(self, buffer: Tensor) -> None:
        """Unpins memory that `register_host_memory` has pinned."""
        torch.cuda.check_error(int(self._runtime().cudaHostUnregister(buffer.data_ptr())))

    def record(
        self, work: Callable[[], None], *, beside: RecordedWork | None = None
    ) -> RecordedWork:
        """Records what a call submits as a CUDA graph."""
        graph = torch.cuda.CUDAGraph()
        pool = None if beside is None else cast("torch.cuda.CUDAGraph", beside).pool()
        # Other threads read data and save checkpoints meanwhile, which must not end the capture.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            work()
        return graph

    @staticmethod
    def _runtime() -> Any:  # noqa: ANN401  torch gives it no type
        return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class MpsDevice(Device):
    """The GPU of an Apple processor: one stream, no float64, and memory that the host shares."""

    has_float64 = False
    has_pinned_memory = False

    def activate(self) -> None:
        """Does nothing: there is one."""

    def new_stream(self) -> Stream:
        """The only stream: all work runs in one order."""
        return self.current_stream()

    def current_stream(self) -> Stream:
        """The only stream."""
        return cast("Stream", torch.accelerator.current_stream(self.torch_device))

    def new_event(self, *, timing: bool = False) -> Event:
        """A new event; nothing waits for it until it is recorded."""
        return cast("Event", torch.Event(self.torch_device, enable_timing=timing))

    def use_stream(self, stream: Stream) -> AbstractContextManager[object]:
        """Does nothing: there is one stream."""
        del stream
        return nullcontext()

    def synchronize(self) -> None:
        """Blocks the host until all work is done."""
        torch.mps.synchronize()

    def memory_allocated(self) -> int:
        """Bytes of live tensors."""
        return int(torch.mps.current_allocated_memory())

    def peak_memory(self) -> int:
        """Bytes that the process has taken: torch counts no peak here."""
        return self.memory_reserved()

    def reset_peak_memory(self) -> bool:
        """False: torch counts no peak here."""
        return False

    def memory_reserved(self) -> int:
        """Bytes that the process has taken, with those that it keeps free."""
        return int(torch.mps.driver_allocated_memory())

    def free_memory(self) -> int:
        """Bytes that Apple recommends to take, less those taken."""
        return max(0, self.total_memory() - self.memory_reserved())

    def total_memory(self) -> int:
        """Bytes that Apple recommends to take at most."""
        return int(torch.mps.recommended_max_memory())

    def default_generator(self) -> torch.Generator:
        """Torch's generator for random operations on this device."""
        return torch.mps._get_default_mps_generator()  # noqa: SLF001  it has no public name


def device_for(torch_device: torch.device | str) -> Device:
    """The device of torch's name; without an index, the current one of its kind.

    Args:
        torch_device: such as `cpu`, `cuda` or `cuda:3`. It need not exist on this machine.
    """
    named = torch.device(torch_device)
    if named.type == "cpu":
        return CpuDevice(torch.device(named.type))
    if named.index is None:
        available = torch.accelerator.is_available()
        index = torch.accelerator.current_device_index() if available else 0
        named = torch.device(named.type, index)
    return {"cuda": CudaDevice, "mps": MpsDevice}.get(named.type, Device)(named)


def accelerator_device() -> Device:
    """The current accelerator of this machine; its CPU if it has none that torch can use."""
    current = torch.accelerator.current_accelerator(check_available=True)
    return device_for(current if current is not None else "cpu")
