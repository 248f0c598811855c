"""Trace: one forward and backward pass of a layer as a list of calls on buffers.

Sizes stand apart from structure, so that passes at several sizes can be compared and every number
fitted as a polynomial: a call names the places of its numbers in one list.
"""

from dataclasses import dataclass
from typing import Literal

from windlass.schema.graph import Collective, OpKind, Quantity
from windlass.schema.tensor_grid import TensorAxis

Role = Literal[
    "parameter",
    "input",  # of the layer, and targets
    "output",
    "handed",  # the gradient of the output
    "gradient",  # of a parameter
    "inner",  # all else that the layer allocates
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Touch:
    """A buffer read or written, and how much of it."""

    buffer: int
    nbytes: int
    """Place of the number of bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call that touches memory, of ATen or of what slices exchange."""

    name: str
    kind: OpKind
    flop: int
    """Place of the number."""
    shape: tuple[int, int, int, int] | None
    """Places of batch, m, n, k of a matrix product."""
    reads: tuple[Touch, ...]
    writes: tuple[Touch, ...]
    random: bool
    """It draws numbers, so that it cannot be run again with the same result."""
    exchange: tuple[Collective, TensorAxis, int] | None = None
    """Of an exchange: what slices do together, which, and the place of the whole buffer's bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """Memory of one tensor and its views."""

    role: Role
    nbytes: int
    """Place of the number of bytes."""
    born: int
    """Index of the call that makes it, or before which it is there."""
    died: int | None
    """It is gone when this call begins; None if it outlives both passes."""

    def lives(self, call: int) -> bool:
        """Whether it is there while a call runs."""
        return self.born <= call and (self.died is None or call < self.died)

    def counts(self, *, forward: bool) -> bool:
        """Whether it is the pass's own; all others the caller holds."""
        return self.role == "inner" or (self.role == "output" and forward)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Forward and backward of one layer in one precision."""

    calls: tuple[Call, ...]
    forward_calls: int
    """The first so many calls are the forward pass."""
    buffers: tuple[Buffer, ...]
    input_bytes: int
    """Place of the number of bytes of the layer's input."""
    output_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A trace with every number as a function of micro-batch and sequence."""

    trace: Trace
    numbers: tuple[Quantity, ...]
