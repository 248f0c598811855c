"""Device: all that differs between a CPU, CUDA, ROCm and other accelerators, in one place.

Nothing else asks which kind of device computes: it asks a `Device` whether work is only enqueued,
for streams, events, pinned memory, memory statistics and generators. A run gets its device once,
and hands it on, so tests may hand in a device of their own. No GPU has run this yet.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, cast

import psutil  # type: ignore[import-untyped]
import torch
from torch import Tensor

from windlass.torch_ext.process_memory import (
    peak_resident_bytes,
    reset_peak_resident,
    resident_bytes,
)
from windlass.torch_ext.streams import Event, HostEvent, HostStream, Stream

_BACKENDS = {"cpu": "gloo", "mps": "gloo", "cuda": "nccl", "xpu": "xccl", "hpu": "hccl"}
"""The backend of torch.distributed for each kind. Source: `Backend.default_device_backend_map` of
torch 2.13; for hpu, Intel Gaudi's documentation of `habana_frameworks.torch.distributed.hccl`."""


_UNRESTRICTED = 64
"""Number of devices that torch takes to be visible where no variable restricts them."""


class Device:
    """One device that computes. Two devices of the same kind and index are equal.

    This class itself is any accelerator that torch knows, such as XPU or HPU.

    Args:
        torch_device: torch's name for it, with its index.
    """

    is_asynchronous: bool = True
    """Whether work is only enqueued, so that the host goes on before it is done."""
    has_float64: bool = True
    """Whether it computes in float64."""
    has_pinned_memory: bool = True
    """Whether copies from and to pinned host memory overlap with computation."""
    piece_elements: int = 2**24
    """Elements of gradients that are converted to float32 at a time: so many that kernels are few,
    and so few that the buffer of 64 MiB hardly counts beside the model."""

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        """What creates tensors takes this."""

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.torch_device == self.torch_device

    def __hash__(self) -> int:
        return hash(self.torch_device)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.torch_device)!r})"

    @property
    def kind(self) -> str:
        """Torch's name for its type: `cpu`, `cuda` (also ROCm), `xpu`, `hpu`, `mps`."""
        return self.torch_device.type

    @property
    def communication_backend(self) -> str:
        """The backend of torch.distributed that carries its tensors."""
        return _BACKENDS.get(self.kind, "gloo")

    def count(self) -> int:
        """How many devices of this kind this process sees."""
        return int(self._module.device_count())

    def visible_indices(self) -> tuple[int, ...] | None:
        """Which of the host's devices of this kind this process sees, as the driver counts them.

        None means that nothing restricts it; no index at all that torch cannot tell.
        """
        return None

    def activate(self) -> None:
        """Makes it the current device of this thread.

        Every thread that submits work calls it: a new thread begins on device 0.
        """
        self._module.set_device(self.torch_device)

    # Streams.

    def new_stream(self) -> Stream:
        """A new stream."""
        return cast("Stream", self._module.Stream(device=self.torch_device))

    def new_event(self, *, timing: bool = False) -> Event:
        """A new event; nothing waits for it until it is recorded.

        Args:
            timing: whether `elapsed_time` may be asked of it, which makes it slower.
        """
        return cast("Event", self._module.Event(enable_timing=timing))

    def current_stream(self) -> Stream:
        """The stream to which this thread submits work."""
        return cast("Stream", self._module.current_stream(self.torch_device))

    def use_stream(self, stream: Stream) -> AbstractContextManager[object]:
        """Submits the work of this thread to a stream of this device, inside the context."""
        return cast("AbstractContextManager[object]", self._module.stream(stream))

    def synchronize(self) -> None:
        """Blocks the host until all work in all streams is done."""
        self._module.synchronize(self.torch_device)

    def hold(self, tensor: Tensor, stream: Stream) -> None:
        """Keeps the memory of a tensor, once freed, until a stream's work so far is done.

        Needed where another stream than the one that allocated a tensor uses it last.
        """
        tensor.record_stream(cast("torch.Stream", stream))

    # Memory.

    def memory_allocated(self) -> int:
        """Bytes of live tensors; on a CPU, resident memory of the process."""
        return int(torch.accelerator.memory_allocated(self.torch_device))

    def peak_memory(self) -> int:
        """The largest `memory_allocated` since `reset_peak_memory`."""
        return int(torch.accelerator.max_memory_allocated(self.torch_device))

    def reset_peak_memory(self) -> bool:
        """Begins a new peak; False if the system does not permit it."""
        torch.accelerator.reset_peak_memory_stats(self.torch_device)
        return True

    def memory_reserved(self) -> int:
        """Bytes that the process has taken from the device, with those that it keeps free."""
        return int(torch.accelerator.memory_reserved(self.torch_device))

    def free_memory(self) -> int:
        """Bytes that no process has taken."""
        return int(torch.accelerator.get_memory_info(self.torch_device)[0])

    def total_memory(self) -> int:
        """Bytes of the device."""
        return int(torch.accelerator.get_memory_info(self.torch_device)[1])

    def register_host_memory(self, buffer: Tensor) -> None:
        """Pins host memory that torch has not allocated.

        Where torch has no call for it, as on XPU, the memory stays pageable: copies are right, but
        slower.

        Args:
            buffer: `UInt8[n]` in host memory, page-aligned.

        Raises:
            RuntimeError: the memory cannot be pinned.
        """

    def unregister_host_memory(self, buffer: Tensor) -> None:
        """Unpins memory that `register_host_memory` has pinned; no copy may still use it."""

    def to_device(self, tensor: Tensor) -> Tensor:
        """A copy of a host tensor; the host does not wait, and may then drop or change its own."""
        if tensor.device.type == "cpu" and self.has_pinned_memory:
            # torch's allocator keeps the pinned copy until the device has read it.
            tensor = tensor.pin_memory()
        return tensor.to(self.torch_device, non_blocking=True)

    # Random numbers.

    def default_generator(self) -> torch.Generator:
        """Torch's generator for random operations on this device."""
        generators = cast("tuple[torch.Generator, ...]", self._module.default_generators)
        return generators[self.torch_device.index or 0]

    @property
    def _module(self) -> "_DeviceModule":
        """Torch's module for this type of device, such as `torch.cuda`."""
        return cast("_DeviceModule", torch.get_device_module(self.torch_device))


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

    def hold(self, tensor: Tensor, stream: Stream) -> None:
        """Does nothing: no work is left."""

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

    def to_device(self, tensor: Tensor) -> Tensor:
        """The tensor itself."""
        return tensor

    def default_generator(self) -> torch.Generator:
        """Torch's default generator."""
        return torch.default_generator


class CudaDevice(Device):
    """A GPU of NVIDIA, or of AMD under ROCm, whose torch has the same names."""

    def visible_indices(self) -> tuple[int, ...] | None:
        """The numbers in `CUDA_VISIBLE_DEVICES` or its like; none if they are UUIDs.

        The driver counts GPUs by PCI address, and so does CUDA where all are of one model.
        """
        visible = torch.cuda._parse_visible_devices()  # noqa: SLF001  it has no public name
        if len(visible) >= _UNRESTRICTED:
            return None
        return tuple(index for index in visible if isinstance(index, int))

    def register_host_memory(self, buffer: Tensor) -> None:
        """Pins host memory, as it is; torch's own pinned memory is rounded to a power of two."""
        code = self._runtime().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)
        torch.cuda.check_error(int(code))

    def unregister_host_memory(self, buffer: Tensor) -> None:
        """Unpins memory that `register_host_memory` has pinned."""
        torch.cuda.check_error(int(self._runtime().cudaHostUnregister(buffer.data_ptr())))

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

    def hold(self, tensor: Tensor, stream: Stream) -> None:
        """Does nothing: later work in the only stream runs later."""

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


class _DeviceModule(Protocol):
    """What torch's module of an accelerator, such as `torch.cuda`, has for `Device`."""

    Stream: Callable[..., object]
    Event: Callable[..., object]
    default_generators: object

    def device_count(self) -> int: ...

    def set_device(self, device: torch.device, /) -> None: ...

    def current_stream(self, device: torch.device, /) -> object: ...

    def stream(self, stream: object, /) -> object: ...

    def synchronize(self, device: torch.device, /) -> None: ...
