"""Records one forward and backward pass of a layer on tensors that have no memory behind them.

The tensors say they are on the CPU, so torch chooses the same operations as in a real run there.
When each buffer is freed is seen by the end of its storage, as it would happen in a real run.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from windlass.capture.op_counts import (
    ALLOCATIONS,
    HIDDEN_IN_PLACE,
    attention_flop,
    collective_call,
    matmul_sizes,
    read_tensors,
    touched_bytes,
)
from windlass.capture.trace import TracedBuffer, TracedCall, BufferRole, BufferAccess, LayerTrace
from windlass.models.loss import layer_loss
from windlass.models.selective_checkpoint import checkpoint_selectively
from windlass.models.shape_inference import fake_state
from windlass.schema.graph import OpKind


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedPass:
    """A trace and its numbers at one size."""

    trace: LayerTrace
    numbers: tuple[int, ...]
    output_shape: tuple[int, ...]
    """Of the layer, before any loss."""


def record_layer(
    layer: nn.Module,
    make_input: Callable[[], Tensor],
    *,
    dtype: torch.dtype,
    target_shape: tuple[int, int] | None,
    selective: bool = False,
) -> RecordedPass:
    """Forward and backward of a layer.

    Args:
        layer: on any device; its weights are not touched.
        make_input: gives the layer's input, called where nothing is allocated.
        dtype: of weights and activations.
        targets: micro-batch and sequence of the targets of the loss that follows the last layer;
            None of any other.
        selectively: whether it keeps only what its large products give.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
        state = fake_state(layer, dtype)
        x = make_input()
        x = x.to(dtype).requires_grad_() if x.is_floating_point() else x
        aims = None if target_shape is None else torch.zeros(target_shape, dtype=torch.int64)
        learned = {id(w): w for w in state.values() if w.requires_grad}
        recorder = _Recorder()
        recorder.know(state.values(), "parameter")
        recorder.know([x] if aims is None else [x, aims], "input")
        with recorder:
            y = _forward(layer, state, x, selectively=selective)
            shape = tuple(y.shape)
            if aims is not None:
                y = layer_loss(layer)(y, aims)
        recorder.ends_forward([y])
        handed = torch.empty_like(y)
        recorder.know([handed], "handed")
        wanted = [*([x] if x.requires_grad else []), *learned.values()]
        gradients: tuple[Tensor | None, ...] = ()
        if wanted and y.requires_grad:
            with recorder:
                gradients = torch.autograd.grad(y, wanted, handed, allow_unused=True)
        of_weights = gradients[1:] if x.requires_grad else gradients
        recorder.know([g for g in of_weights if g is not None], "gradient")
        return recorder.finish(x, y, shape)


def _forward(layer: nn.Module, state: dict[str, Tensor], x: Tensor, *, selectively: bool) -> Tensor:
    def run(x: Tensor) -> Tensor:
        return functional_call(layer, state, (x,))

    return checkpoint_selectively(run, x, preserve_rng=False) if selectively else run(x)


class _Recorder(TorchDispatchMode):
    """Sees every call of ATen and every exchange, and the end of every storage."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[TracedCall] = []
        self._numbers: list[int] = []
        self._buffers: list[TracedBuffer] = []
        self._ids: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._forward_calls = 0

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401  whatever ATen takes and gives
        out = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if made and isinstance(func, OpOverload):
            taken = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            self._note(func, args, taken, made)
        return out

    def know(self, tensors: Iterable[Tensor], role: BufferRole) -> None:
        """Sets the role of the memory behind tensors."""
        for tensor in tensors:
            index = self._buffer(tensor)
            self._buffers[index] = replace(self._buffers[index], role=role)

    def ends_forward(self, outputs: Sequence[Tensor]) -> None:
        """All later calls are the backward pass."""
        self._forward_calls = len(self._calls)
        for tensor in outputs:
            index = self._buffer(tensor)
            # A layer that hands its input on has no output of its own.
            if self._buffers[index].role == "inner":
                self._buffers[index] = replace(self._buffers[index], role="output")

    def finish(self, x: Tensor, y: Tensor, shape: tuple[int, ...]) -> RecordedPass:
        """What was seen."""
        trace = LayerTrace(
            calls=tuple(self._calls),
            forward_calls=self._forward_calls,
            input_bytes=self._number(touched_bytes(x)),
            output_bytes=self._number(touched_bytes(y)),
            buffers=tuple(self._buffers),
        )
        return RecordedPass(trace=trace, numbers=tuple(self._numbers), output_shape=shape)

    def _note(
        self, func: OpOverload, args: tuple[Any, ...], taken: list[Tensor], made: list[Tensor]
    ) -> None:
        old = {self._ids.get(tensor.untyped_storage()) for tensor in taken}
        mutates = func._schema.is_mutable  # noqa: SLF001  the public way to ask does not exist
        fresh = [t for t in made if mutates or self._ids.get(t.untyped_storage()) not in old]
        if not fresh:
            return  # a view
        if func.overloadpacket in ALLOCATIONS:
            for tensor in fresh:
                self._buffer(tensor)
            return
        if func.overloadpacket in HIDDEN_IN_PLACE:
            self._same_memory(made[0], taken[0])
        reads = tuple(
            BufferAccess(buffer=self._buffer(tensor), nbytes=self._number(nbytes))
            for tensor, nbytes in read_tensors(func, taken, made)
        )
        writes = tuple(
            BufferAccess(buffer=self._buffer(tensor), nbytes=self._number(touched_bytes(tensor)))
            for tensor in fresh
        )
        found = collective_call(func, args, made)
        call = self._call(func, taken, reads, writes)
        if found is not None:
            how, among, nbytes = found
            call = replace(call, kind="collective", exchange=(how, among, self._number(nbytes)))
        self._calls.append(call)

    def _call(
        self, func: OpOverload, taken: list[Tensor], reads: tuple[BufferAccess, ...],
        writes: tuple[BufferAccess, ...],
    ) -> TracedCall:  # fmt: skip
        name = func.overloadpacket.__name__
        random = torch.Tag.nondeterministic_seeded in func.tags
        sizes = matmul_sizes(func, taken)
        if sizes is not None:
            batch, m, n, k = (self._number(size) for size in sizes)
            flop = self._number(2 * sizes[0] * sizes[1] * sizes[2] * sizes[3])
            return TracedCall(
                name=name, kind="matmul", flop=flop, matmul_sizes=(batch, m, n, k), reads=reads,
                writes=writes, random=random,
            )  # fmt: skip
        count = attention_flop(func, taken)
        kind: OpKind = "memory" if count is None else "attention"
        return TracedCall(
            name=name, kind=kind, flop=self._number(count or 0), matmul_sizes=None, reads=reads,
            writes=writes, random=random,
        )  # fmt: skip

    def _buffer(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        index = self._ids.get(storage)
        if index is None:
            index = len(self._buffers)
            self._ids[storage] = index
            nbytes = self._number(storage.nbytes())
            self._buffers.append(
                TracedBuffer(role="inner", nbytes=nbytes, first_call=len(self._calls), freed_at=None)
            )
            weakref.finalize(storage, self._ends, index)
        return index

    def _same_memory(self, made: Tensor, taken: Tensor) -> None:
        """Takes a new tensor for the one that it would have been written to."""
        index, storage = self._buffer(taken), made.untyped_storage()
        self._ids[storage] = index
        weakref.finalize(storage, self._ends, index)

    def _ends(self, index: int) -> None:
        self._buffers[index] = replace(self._buffers[index], died=len(self._calls))

    def _number(self, value: int) -> int:
        self._numbers.append(value)
        return len(self._numbers) - 1
