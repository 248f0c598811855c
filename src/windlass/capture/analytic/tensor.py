"""Tensors that have a shape, strides and a storage, but no elements."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Literal, NamedTuple, Protocol

from windlass.capture.analytic.strides import Shape, contiguous_strides
from windlass.capture.trace import TraceBuilder, TracedCall
from windlass.schema import CollectiveKind, OpKind, TensorAxis

DataType = Literal["float32", "bfloat16", "int64", "int32", "bool"]

DTYPE_BYTES: dict[DataType, int] = {
    "float32": 4, "bfloat16": 2, "int64": 8, "int32": 4, "bool": 1,
}  # fmt: skip


class Storage:
    """Memory of a tensor and its views; a trace notes when it is garbage collected."""

    __slots__ = ("__weakref__", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


class SavedTensor(Protocol):
    """What a node holds in place of a tensor that is recomputed."""

    def take(self) -> "Tensor":
        """The tensor, which is not kept any longer."""


class OutputKeeper(Protocol):
    """A selective activation checkpoint under which operations run."""

    def pack(self, tensor: "Tensor") -> "Tensor | SavedTensor":
        """What a node holds in place of a tensor that it saves."""

    def kept(
        self, run: Callable[[], tuple["Tensor", ...]], partial_sum: "Tensor | None" = None
    ) -> tuple["Tensor", ...]:
        """The outputs of an operation that are kept."""


class Tape:
    """What is recorded of one layer: its trace, and what autograd needs."""

    def __init__(self) -> None:
        self.trace = TraceBuilder()
        self.records_gradients = True
        self.nodes = 0
        """Number of autograd nodes so far."""
        self.checkpoint: OutputKeeper | None = None
        """The checkpoint under which operations run; None if there is none."""

    def call(
        self,
        name: str,
        reads: Sequence["Tensor | tuple[Tensor, int]"],
        writes: Sequence["Tensor | tuple[Tensor, int]"],
        *,
        kind: OpKind = "memory",
        flop: int = 0,
        matmul_sizes: tuple[int, int, int, int] | None = None,
        kept: tuple[int, int] | None = None,
        random: bool = False,
        collective: tuple[CollectiveKind, TensorAxis, int] | None = None,
        is_causal: bool | None = None,
    ) -> None:
        """Records one ATen call.

        Args:
            reads: tensors that it reads, with the bytes it touches if these are not all.
            writes: tensors that it writes, with the bytes if these are not all.
            kind: what bounds it.
            matmul_sizes: batch, m, n, k of a matrix product.
            kept: side of a block and elements of all kept blocks of a sparse weight.
            collective: kind and axis of a collective, and the bytes of its full buffer.
            is_causal: False for attention without a mask.
        """
        trace = self.trace
        touched: dict[tuple[int, int, Shape, Shape], tuple[Tensor, int]] = {}
        for item in reads:
            tensor, nbytes = _with_bytes(item)
            # An operand that occurs twice is read once.
            key = (id(tensor.storage), tensor.offset, tensor.shape, tensor.strides)
            touched.setdefault(key, (tensor, nbytes))
        trace.add_call(
            TracedCall(
                name=name,
                kind=kind,
                reads=tuple(
                    trace.access(tensor.storage, tensor.storage.nbytes, nbytes)
                    for tensor, nbytes in touched.values()
                ),
                writes=tuple(
                    trace.access(tensor.storage, tensor.storage.nbytes, nbytes)
                    for tensor, nbytes in map(_with_bytes, writes)
                ),
                flop=trace.number(flop),
                matmul_sizes=matmul_sizes and tuple(map(trace.number, matmul_sizes)),  # type: ignore[arg-type]  # four sizes
                kept=kept,
                random=random,
                collective=collective and (*collective[:2], trace.number(collective[2])),
                is_causal=is_causal,
            )
        )


class Tensor:
    """A tensor without elements."""

    __slots__ = ("dtype", "node", "offset", "output", "shape", "storage", "strides", "tape")

    def __init__(
        self,
        tape: Tape,
        shape: Shape,
        dtype: DataType,
        strides: Shape | None = None,
        *,
        view_of: "tuple[Storage, int] | None" = None,
    ) -> None:
        self.tape = tape
        self.shape = shape
        self.dtype: DataType = dtype
        self.strides = contiguous_strides(shape) if strides is None else strides
        nbytes = prod(shape) * DTYPE_BYTES[dtype]
        self.storage, self.offset = (Storage(nbytes), 0) if view_of is None else view_of
        self.node: Node | None = None
        """The node of the autograd graph that made it; None if it needs no gradient."""
        self.output = 0
        """Which output of its node it is."""

    @property
    def touched_bytes(self) -> int:
        """Bytes of distinct elements; broadcast elements count once."""
        shape, strides = self.shape, self.strides
        if 0 in strides:
            sizes = zip(shape, strides, strict=True)
            shape = tuple(size for size, stride in sizes if stride)
        return prod(shape) * DTYPE_BYTES[self.dtype]

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in memory in their order."""
        dims = zip(self.shape, self.strides, contiguous_strides(self.shape), strict=True)
        return all(size == 1 or stride == wanted for size, stride, wanted in dims)

    @property
    def buffer(self) -> int:
        """Index of its buffer in the trace."""
        return self.tape.trace.buffer(self.storage, self.storage.nbytes)

    def alias(self, shape: Shape, strides: Shape, offset: int = 0) -> "Tensor":
        """A view that needs no gradient."""
        place = (self.storage, self.offset + offset)
        return Tensor(self.tape, shape, self.dtype, strides, view_of=place)

    def detach(self) -> "Tensor":
        """The same elements without their autograd graph."""
        return self.alias(self.shape, self.strides)


def _with_bytes(item: Tensor | tuple[Tensor, int]) -> tuple[Tensor, int]:
    return item if isinstance(item, tuple) else (item, item.touched_bytes)


Gradients = list[Tensor | None]
Needs = tuple[bool, ...]
Backward = Callable[[Gradients, Sequence[Tensor], Needs], Sequence[Tensor | None]]
"""Gradients of the outputs, saved tensors, and which inputs need a gradient -> their gradients."""


class Edge(NamedTuple):
    """Where the gradient of an input goes, and what it must look like."""

    node: "Node"
    output: int
    shape: Shape
    dtype: DataType


class Node:
    """An operation of the autograd graph, or a leaf."""

    __slots__ = ("backward", "edges", "outputs", "saved", "sequence")

    def __init__(
        self, sequence: int, edges: tuple[Edge | None, ...], backward: Backward | None
    ) -> None:
        self.sequence = sequence
        self.edges = edges
        self.backward = backward
        """None for a leaf."""
        self.saved: list[Tensor | SavedTensor] = []
        self.outputs = 1

    def save(self, tensors: Sequence[Tensor], tape: Tape) -> None:
        """Saves tensors for backward."""
        checkpoint = tape.checkpoint
        for tensor in tensors:
            self.saved.append(tensor.detach() if checkpoint is None else checkpoint.pack(tensor))
