"""Trace: one forward and backward pass of a layer as a list of calls on buffers.

Sizes stand apart from structure, so that passes at several sizes can be compared and every number
fitted as a polynomial: a call names the places of its numbers in one list.
"""

from dataclasses import dataclass
from typing import Literal

from windlass.schema.graph import CollectiveKind, OpKind, Polynomial
from windlass.schema.tensor_grid import TensorAxis

BufferRole = Literal[
    "parameter",
    "input",  # of the layer, and targets
    "output",
    "handed",  # the gradient of the output
    "gradient",  # of a parameter
    "inner",  # all else that the layer allocates
]


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferAccess:
    """A buffer read or written, and how much of it."""

    buffer: int
    nbytes: int
    """Place of the number of bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedCall:
    """One call that touches memory, of ATen or of what slices exchange."""

    name: str
    kind: OpKind
    flop: int
    """Place of the number."""
    matmul_sizes: tuple[int, int, int, int] | None
    """Places of batch, m, n, k of a matrix product."""
    reads: tuple[BufferAccess, ...]
    writes: tuple[BufferAccess, ...]
    random: bool
    """It draws numbers, so that it cannot be run again with the same result."""
    collective: tuple[CollectiveKind, TensorAxis, int] | None = None
    """Of an exchange: what slices do together, which, and the place of the whole buffer's bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedBuffer:
    """Memory of one tensor and its views."""

    role: BufferRole
    nbytes: int
    """Place of the number of bytes."""
    first_call: int
    """Index of the call that makes it, or before which it is there."""
    freed_at: int | None
    """It is gone when this call begins; None if it outlives both passes."""

    def is_live(self, call: int) -> bool:
        """Whether it is there while a call runs."""
        return self.first_call <= call and (self.freed_at is None or call < self.freed_at)

    def is_charged(self, *, forward: bool) -> bool:
        """Whether it is the pass's own; all others the caller holds."""
        return self.role == "inner" or (self.role == "output" and forward)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTrace:
    """Forward and backward of one layer in one precision."""

    calls: tuple[TracedCall, ...]
    forward_calls: int
    """The first so many calls are the forward pass."""
    buffers: tuple[TracedBuffer, ...]
    input_bytes: int
    """Place of the number of bytes of the layer's input."""
    output_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedTrace:
    """A trace with every number as a function of micro-batch and sequence."""

    trace: LayerTrace
    numbers: tuple[Polynomial, ...]
