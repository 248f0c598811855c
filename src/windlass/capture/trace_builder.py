"""Builds a layer trace call by call (this module does not import torch).

A buffer counts as freed when its storage is garbage collected, as in a real run.
"""

import weakref
from collections.abc import Iterable
from dataclasses import replace

from windlass.capture.trace import BufferAccess, BufferRole, LayerTrace, TracedBuffer, TracedCall


class TraceBuilder:
    """Calls, numbers and buffers of a layer's passes; buffers are known by their storage."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._calls: list[TracedCall] = []
        self._buffers: list[TracedBuffer] = []
        self._indices: dict[int, int] = {}
        self._forward_calls = 0

    def number(self, value: int) -> int:
        """Appends a number and returns its index."""
        self.numbers.append(value)
        return len(self.numbers) - 1

    def known_buffer(self, storage: object) -> int | None:
        """Index of a storage's buffer; None if it has none yet."""
        return self._indices.get(id(storage))

    def buffer(self, storage: object, nbytes: int) -> int:
        """Index of a storage's buffer, which is added if it is new."""
        index = self._indices.get(id(storage))
        if index is None:
            index = len(self._buffers)
            self._buffers.append(
                TracedBuffer(
                    role="internal",
                    nbytes=self.number(nbytes),
                    first_call=len(self._calls),
                    freed_at=None,
                )
            )
            self._keep_index(storage, index)
        return index

    def share_buffer(self, storage: object, index: int) -> None:
        """Gives a storage a buffer that is there already."""
        self._keep_index(storage, index)

    def access(self, storage: object, storage_bytes: int, nbytes: int) -> BufferAccess:
        """A read or write of some bytes of a storage."""
        return BufferAccess(buffer=self.buffer(storage, storage_bytes), nbytes=self.number(nbytes))

    def set_role(self, buffers: Iterable[int], role: BufferRole) -> None:
        """Sets the role of some buffers."""
        for index in buffers:
            self._buffers[index] = replace(self._buffers[index], role=role)

    def add_call(self, call: TracedCall) -> None:
        """Appends a call."""
        self._calls.append(call)

    def end_forward(self, outputs: Iterable[int]) -> None:
        """Marks the end of the forward pass; all later calls belong to the backward pass."""
        self._forward_calls = len(self._calls)
        # A layer that returns its input has no output of its own.
        self.set_role((i for i in outputs if self._buffers[i].role == "internal"), "output")

    def finish(self, *, input_bytes: int, output_bytes: int) -> LayerTrace:
        """The trace, given the bytes of the layer's input and output."""
        return LayerTrace(
            calls=tuple(self._calls),
            forward_calls=self._forward_calls,
            input_bytes=self.number(input_bytes),
            output_bytes=self.number(output_bytes),
            buffers=tuple(self._buffers),
        )

    def _keep_index(self, storage: object, index: int) -> None:
        key = id(storage)
        self._indices[key] = index
        weakref.finalize(storage, self._free, key, index)

    def _free(self, key: int, index: int) -> None:
        # Another storage may have the same id from now on.
        del self._indices[key]
        self._buffers[index] = replace(self._buffers[index], freed_at=len(self._calls))
