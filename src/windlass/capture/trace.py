"""One forward and backward pass of a layer as a list of calls on buffers.

Structure and sizes are kept apart, so that passes at several sizes can be compared and every number
fitted as a polynomial: a call refers to its numbers by their index in one list.

A buffer counts as freed when its storage is garbage collected, as in a real run.
"""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
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


FIT_MICRO_BATCHES = (2, 3)
"""Two sizes suffice for what is linear in the micro-batch; size 1 would be a special case."""


def fit_polynomial(values: Mapping[tuple[int, int], int], sequences: Sequence[int]) -> Polynomial:
    """The polynomial through the values at `FIT_MICRO_BATCHES` x three sequences.

    Args:
        values: values by (micro-batch, sequence); further points are ignored.
        sequences: three different lengths, or three times the only one.
    """
    low, high = FIT_MICRO_BATCHES
    if len(set(sequences)) == 1:
        first, second = (values[each, sequences[0]] for each in (low, high))
        return Polynomial(
            constant=float(Fraction(high * first - low * second, high - low)),
            b=float(Fraction(second - first, high - low)),
        )
    slopes = [Fraction(values[high, s] - values[low, s], high - low) for s in sequences]
    fixed = [values[low, s] - low * slope for s, slope in zip(sequences, slopes, strict=True)]
    constant, s, ss = _parabola(sequences, fixed)
    b, bs, bss = _parabola(sequences, slopes)
    return Polynomial(constant=constant, s=s, ss=ss, b=b, bs=bs, bss=bss)


def sum_polynomials(polynomials: Iterable[Polynomial]) -> Polynomial:
    """The sum of polynomials; zero if there are none."""
    first, *others = (*polynomials,) or (Polynomial(),)
    return first.plus(*others) if others else first


def _parabola(xs: Sequence[int], ys: Sequence[Fraction]) -> tuple[float, float, float]:
    """Coefficients of `c0 + c1 x + c2 x^2` through three points, by divided differences."""
    x0, x1, x2 = xs
    y0, y1, y2 = ys
    first = Fraction(y1 - y0) / (x1 - x0)
    second = (Fraction(y2 - y1) / (x2 - x1) - first) / (x2 - x0)
    slope = first - second * (x0 + x1)
    return float(y0 - slope * x0 - second * x0 * x0), float(slope), float(second)
