"""Device: all that may differ between a CPU, CUDA, ROCm and other accelerators, as one interface.

`device_kinds` has those that do. Nothing else asks which kind of device computes: it asks a
`Device` whether work is only enqueued, for streams, events, pinned memory, memory statistics and
generators. A run gets its device once, and hands it on, so tests may hand in a device of their own.
No GPU has run this yet.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, cast

import torch
from torch import Tensor

from windlass.torch_ext.streams import Event, RecordedWork, Stream

_BACKENDS = {"cpu": "gloo", "mps": "gloo", "cuda": "nccl", "xpu": "xccl", "hpu": "hccl"}
"""The backend of torch.distributed for each kind. Source: `Backend.default_device_backend_map` of
torch 2.13; for hpu, Intel Gaudi's documentation of `habana_frameworks.torch.distributed.hccl`."""


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
    can_record: bool = False
    """Whether work can be recorded once and submitted again as a whole, as a CUDA graph is."""
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

    def has_bfloat16(self) -> bool:
        """Whether it multiplies in bfloat16 itself; torch only emulates that on older GPUs."""
        return True

    def has_tf32(self) -> bool:
        """Whether matrix products of float32 can round their factors to TF32."""
        return False

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

    def to_device(self, tensor: Tensor, *, into: Tensor | None = None) -> Tensor:
        """A copy of a host tensor; the host does not wait, and may then drop or change its own.

        Args:
            into: a tensor of the device that becomes the copy; None makes a new one.
        """
        if tensor.device.type == "cpu" and self.has_pinned_memory:
            # torch's allocator keeps the pinned copy until the device has read it.
            tensor = tensor.pin_memory()
        if into is None:
            return tensor.to(self.torch_device, non_blocking=True)
        return into.copy_(tensor, non_blocking=True)

    # Recorded work.

    def record(
        self, work: Callable[[], None], *, beside: RecordedWork | None = None
    ) -> RecordedWork:
        """Records what a call submits, and runs none of it.

        What is recorded reads and writes the memory that its tensors have now. Tensors that it
        makes lie in a pool of its own, which outlives them; nothing else uses that memory.

        Args:
            work: submits it to the current stream; the host waits for nothing in it.
            beside: recorded earlier, and always replayed before; both share one pool, in which
                memory that is free when this begins may be used again.

        Raises:
            RuntimeError: `work` waits for the device, or does what cannot be recorded.
            NotImplementedError: `can_record` is False.
        """
        raise NotImplementedError(f"torch records no work of `{self.kind}`")

    # Random numbers.

    def default_generator(self) -> torch.Generator:
        """Torch's generator for random operations on this device."""
        generators = cast("tuple[torch.Generator, ...]", self._module.default_generators)
        return generators[self.torch_device.index or 0]

    @property
    def _module(self) -> "_DeviceModule":
        """Torch's module for this type of device, such as `torch.cuda`."""
        return cast("_DeviceModule", torch.get_device_module(self.torch_device))


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
