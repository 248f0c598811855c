"""Streams and events of a device, as much of them as moves between tiers need.

Torch has a module of the same names for each kind of device. That of a CPU does nothing, so the
same lines run there.
"""

from contextlib import AbstractContextManager
from typing import Protocol, cast

import torch


class StreamEvent(Protocol):
    """A moment in a stream."""

    def record(self, stream: object = None) -> None:
        """Sets it to when all is done that a stream was asked for so far; None: the current one."""

    def wait(self, stream: object = None) -> None:
        """What a stream is asked for from now on waits for it; the host does not."""

    def synchronize(self) -> None:
        """Returns when it has come."""


class StreamModule(Protocol):
    """Torch's module of one kind of device."""

    def Stream(self) -> object:  # noqa: N802  torch's names
        """A new stream."""

    def Event(self) -> StreamEvent:  # noqa: N802
        """A new event, which has come."""

    def stream(self, stream: object, /) -> AbstractContextManager[object]:
        """What this thread asks for inside goes into that stream."""

    def current_stream(self) -> object:
        """Where what this thread asks for goes."""


def stream_module(device: torch.device) -> StreamModule:
    """The streams of a device."""
    return cast("StreamModule", torch.get_device_module(device))
