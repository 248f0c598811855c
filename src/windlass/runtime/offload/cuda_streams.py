"""The part of torch's streams and events that transfers between tiers need.

torch has a module of the same interface for each device type. That of the CPU does nothing, so the
same code runs there.
"""

from contextlib import AbstractContextManager
from typing import Protocol, cast

import torch


class StreamEvent(Protocol):
    """A point in a stream's work."""

    def record(self, stream: object = None) -> None:
        """Marks the work submitted to a stream so far; None: the current stream."""

    def wait(self, stream: object = None) -> None:
        """Makes later work of a stream wait for the event; the host does not wait."""

    def synchronize(self) -> None:
        """Blocks the host until the marked work is done."""


class StreamModule(Protocol):
    """torch's module of one device type, such as `torch.cuda`."""

    def Stream(self) -> object:  # noqa: N802  torch's names
        """A new stream."""

    def Event(self) -> StreamEvent:  # noqa: N802
        """A new event; nothing waits for it until it is recorded."""

    def stream(self, stream: object, /) -> AbstractContextManager[object]:
        """Submits the work of this thread to a stream, inside the context."""

    def current_stream(self) -> object:
        """The stream to which this thread submits work."""


def stream_module(device: torch.device) -> StreamModule:
    """Torch's stream module for a device."""
    return cast("StreamModule", torch.get_device_module(device))
