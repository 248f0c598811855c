"""One forward and backward pass of a layer as a list of calls on buffers.

Structure and sizes are kept apart, so that passes at several sizes can be compared and every number
fitted as a polynomial: a call refers to its numbers by their index in one list.
"""

from dataclasses import dataclass
from typing import Literal

from windlass.schema import CollectiveKind, OpKind, Polynomial, TensorAxis

FUSED_SOFTMAX = "linear_cross_entropy_softmax"
"""Name of the call that stands for what a fused loss does besides its matrix products."""

BufferRole = Literal[
    "parameter",
    "input",  # of the layer, and targets of the loss
    "output",
    "output_gradient",
    "parameter_gradient",
    "internal",  # everything else that the layer allocates
]


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferAccess:
    """A buffer that a call reads or writes, and how much of it."""

    buffer: int
    """Index of the buffer."""
    nbytes: int
    """Index of the number of bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedCall:
    """One call that touches memory: an ATen operation or a tensor-parallel collective."""

    name: str
    kind: OpKind
    flop: int
    """Index of the number of floating-point operations."""
    matmul_sizes: tuple[int, int, int, int] | None
    """Indices of batch, m, n, k of a matrix product, of a sparse one those of the dense product;
    None for any other call."""
    reads: tuple[BufferAccess, ...]
    writes: tuple[BufferAccess, ...]
    random: bool
    """Whether it draws random numbers, so that running it again gives another result."""
    collective: tuple[CollectiveKind, TensorAxis, int] | None = None
    """Kind and axis of a collective, and the index of the full buffer's bytes; None for any other
    call."""
    kept: tuple[int, int] | None = None
    """Side of a block and elements of all kept blocks of a sparse weight; None for any other
    call."""
    is_causal: bool | None = None
    """False for attention in which tokens see later ones too; None otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedBuffer:
    """Memory of one tensor and its views."""

    role: BufferRole
    nbytes: int
    """Index of the number of bytes."""
    first_call: int
    """Index of the call that allocates it, or of the first call after it appeared."""
    freed_at: int | None
    """Index of the call before which it is freed; None if it outlives both passes."""

    def is_live(self, call: int) -> bool:
        """Whether it is allocated while a call runs."""
        return self.first_call <= call and (self.freed_at is None or call < self.freed_at)

    def is_charged(self, *, forward: bool) -> bool:
        """Whether its bytes count for the pass; those of all other buffers count for the caller."""
        return self.role == "internal" or (self.role == "output" and forward)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTrace:
    """Forward and backward pass of one layer in one precision."""

    calls: tuple[TracedCall, ...]
    forward_calls: int
    """Number of calls of the forward pass, which come first."""
    buffers: tuple[TracedBuffer, ...]
    input_bytes: int
    """Index of the number of bytes of the layer's input."""
    output_bytes: int
    """Index of the number of bytes of the layer's output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedTrace:
    """A trace with every number as a polynomial of micro-batch and sequence."""

    trace: LayerTrace
    numbers: tuple[Polynomial, ...]
    """Polynomials by the indices that the trace uses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTrace:
    """A fitted trace, and the names of the layer's parameters."""

    fitted: FittedTrace
    parameters: tuple[str, ...]
    """Name of each buffer whose role is `parameter`, in their order."""
