"""The autograd graph: nodes, what they save, and what a checkpoint recomputes of that."""

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Sequence

from windlass.capture.analytic.tensor import (
    Backward,
    Edge,
    Gradients,
    Node,
    Tape,
    Tensor,
)

_LEAF = 2**62
"""Sequence number of leaves, which come first."""


class Recomputed(Exception):  # noqa: N818  it is no error
    """Ends a recomputation, all of whose results are there."""


class Slot:
    """Place of a saved tensor that is recomputed."""

    __slots__ = ("__weakref__", "checkpoint", "tensor")

    def __init__(self, checkpoint: "Checkpoint") -> None:
        self.checkpoint = checkpoint
        self.tensor: Tensor | None = None

    def take(self) -> Tensor:
        """The recomputed tensor, which is not kept any longer."""
        self.checkpoint.recompute()
        tensor, self.tensor = self.tensor, None
        if tensor is None:
            raise RuntimeError("a saved tensor was not recomputed, or is taken twice")
        return tensor


class Checkpoint:
    """Selective activation checkpointing: some outputs are kept, the rest is computed again.

    See `models.selective_checkpoint` and torch.utils.checkpoint, whose effects this has.
    """

    def __init__(self, tape: Tape, run: Callable[[], Tensor]) -> None:
        self._tape = tape
        self._run = run
        self._slots: list[weakref.ref[Slot]] = []
        """Nodes hold the slots, which hold this: what was kept is freed with the last of them."""
        self._kept: deque[tuple[Tensor, ...]] = deque()
        self._filled: int | None = None
        """Number of slots that are filled again; None in the forward pass."""

    def forward(self) -> Tensor:
        """The output of the forward pass."""
        self._tape.checkpoint = self
        output = self._run()
        self._tape.checkpoint = None
        return output

    def recompute(self) -> None:
        """Runs the forward pass again, up to the last tensor that backward needs; once."""
        tape = self._tape
        if self._filled is not None:
            return
        self._filled = 0
        tape.checkpoint, tape.records_gradients = self, True
        with contextlib.suppress(Recomputed):
            self._run()
        tape.checkpoint, tape.records_gradients = None, False

    def pack(self, tensor: Tensor) -> "Slot | Tensor":
        """What a node holds in place of a tensor that it saves."""
        if self._filled is None:
            slot = Slot(self)
            self._slots.append(weakref.ref(slot))
            return slot
        wanted = self._slots[self._filled]()
        if wanted is not None:
            wanted.tensor = tensor.detach()
        self._filled += 1
        if self._filled == len(self._slots):
            raise Recomputed
        return tensor.detach()

    def kept(
        self, run: Callable[[], tuple[Tensor, ...]], partial_sum: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """The outputs of an operation that are kept.

        Args:
            partial_sum: its input, if it is a reduction: that is not kept, although it was.
        """
        if self._filled is not None:
            return self._kept.popleft()
        outputs = run()
        if partial_sum is not None and self._kept:
            (last, *_) = self._kept[-1]
            if last.storage is partial_sum.storage:
                scalar = Tensor(self._tape, (), last.dtype)
                _ = scalar.buffer
                zeros = (0,) * len(last.shape)
                self._kept[-1] = (scalar.alias(last.shape, zeros),)
            del last
        self._kept.append(tuple(output.detach() for output in outputs))
        return outputs


def leaf(tensor: Tensor) -> Tensor:
    """Makes a tensor one that needs a gradient."""
    tensor.node = Node(_LEAF, (), None)
    return tensor


def new_node(
    inputs: Sequence[Tensor], backward: Backward, save: Sequence[Tensor] = ()
) -> Node | None:
    """The autograd node of an operation; None if no gradient is needed.

    Args:
        backward: gives their gradients. It must not refer to tensors, which would stay alive.
    """
    tape = inputs[0].tape
    if not tape.records_gradients or all(tensor.node is None for tensor in inputs):
        return None
    tape.nodes += 1
    edges = (
        None
        if tensor.node is None
        else Edge(tensor.node, tensor.output, tensor.shape, tensor.dtype)
        for tensor in inputs
    )
    node = Node(tape.nodes, tuple(edges), backward)
    node.save(save, tape)
    return node


def attach(node: Node | None, *outputs: Tensor) -> Tensor:
    """Makes tensors the outputs of a node; returns the first."""
    if node is not None:
        node.outputs = len(outputs)
        for index, output in enumerate(outputs):
            output.node, output.output = node, index
    return outputs[0]


def only(gradients: Gradients) -> Tensor:
    """The gradient of the only output."""
    (gradient,) = gradients
    if gradient is None:
        raise RuntimeError("an output has no gradient")
    return gradient


def kept_outputs(x: Tensor, run: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """The outputs of an operation on `x` that selective activation checkpointing keeps."""
    checkpoint = x.tape.checkpoint
    return run() if checkpoint is None else checkpoint.kept(run)
