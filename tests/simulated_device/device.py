"""SimulatedDevice: what a run takes for its accelerator."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from simulated_device.graphs import SimulatedGraph
from simulated_device.operations import Operations
from simulated_device.schedules import Schedule
from simulated_device.simulation import Simulation, Site
from simulated_device.streams import SimulatedEvent, SimulatedStream
from simulated_device.tensor import DEVICE
from windlass.torch_ext import Device, Event, RecordedWork, Stream


class SimulatedDevice(Device):
    """An accelerator whose streams run late; a context, outside of which it does nothing.

    Args:
        schedule: which stream may run when events leave it open.
        seed: seed of a random schedule.
        drop: sites that do nothing: the mutation under test.
    """

    def __init__(
        self, schedule: Schedule, *, seed: int = 0, drop: frozenset[Site] = frozenset()
    ) -> None:
        super().__init__(DEVICE)
        self.simulation = Simulation(schedule, seed, drop)
        self._operations = Operations(self.simulation)

    def __enter__(self) -> Self:
        # Else `Module.to` would move the wrapper's own data, of which there are none.
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        self._operations.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._operations.__exit__(kind, error, trace)
        torch.__future__.set_overwrite_module_params_on_conversion(False)

    @property
    def kind(self) -> str:
        """Its own name: nothing may take it for a CPU."""
        return "simulated"

    def count(self) -> int:
        """One."""
        return 1

    def activate(self) -> None:
        """Lets this thread allocate on it."""
        if self._operations not in _get_current_dispatch_mode_stack():
            self._operations.__enter__()

    def new_stream(self) -> Stream:
        """A new stream."""
        return self.simulation.new_stream()

    def new_event(self, *, timing: bool = False) -> Event:
        """A new event."""
        del timing
        return SimulatedEvent(self.simulation)

    def current_stream(self) -> Stream:
        """The stream to which this thread submits work."""
        return self.simulation.current_stream()

    def use_stream(self, stream: Stream) -> AbstractContextManager[object]:
        """Submits the work of this thread to a stream."""
        return self.simulation.use_stream(cast("SimulatedStream", stream))

    def synchronize(self) -> None:
        """Blocks the host until all work is done."""
        self.simulation.synchronize_all()

    can_record = True

    def record(
        self, work: Callable[[], None], *, beside: RecordedWork | None = None
    ) -> RecordedWork:
        """Records what a call submits, and runs none of it."""
        return self.simulation.record_work(work, cast("SimulatedGraph | None", beside))

    def memory_allocated(self) -> int:
        """Nothing is counted."""
        return 0

    def peak_memory(self) -> int:
        """Nothing is counted."""
        return 0

    def reset_peak_memory(self) -> bool:
        """Nothing is counted."""
        return True

    def memory_reserved(self) -> int:
        """Nothing is counted."""
        return 0

    def free_memory(self) -> int:
        """More than any test needs."""
        return 2**40

    def total_memory(self) -> int:
        """More than any test needs."""
        return 2**40

    def register_host_memory(self, buffer: Tensor) -> None:
        """Lets copies from and to this memory run late."""
        self._operations.pin(buffer)

    def unregister_host_memory(self, buffer: Tensor) -> None:
        """Ends that."""
        self._operations.unpin(buffer)

    def to_device(self, tensor: Tensor, *, into: Tensor | None = None) -> Tensor:
        """A copy of a host tensor that arrives late."""
        if into is None:
            return tensor.to(DEVICE, non_blocking=True)
        return into.copy_(tensor, non_blocking=True)

    def default_generator(self) -> torch.Generator:
        """The CPU's, from which a plain run draws too."""
        return torch.default_generator
