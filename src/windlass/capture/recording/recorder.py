"""Records one forward and backward pass of a layer on fake tensors, which have no memory.

The tensors claim to be on the CPU, so that torch chooses the same operations as in a real run
there. A buffer counts as freed when its storage is garbage collected, as in a real run.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from windlass.capture.recording.op_counts import (
    ALLOCATIONS,
    HIDDEN_IN_PLACE,
    attention_flop,
    collective_call,
    fused_loss_sizes,
    matmul_sizes,
    read_tensors,
    section_sizes,
    sparse_product,
    takes_causal_mask,
    touched_bytes,
)
from windlass.capture.trace import (
    FUSED_SOFTMAX,
    BufferAccess,
    BufferRole,
    LayerTrace,
    TraceBuilder,
    TracedCall,
)
from windlass.models import (
    FusedLossSizes,
    checkpoint_selectively,
    fake_state,
    fuse_loss,
    has_sentence_head,
    layer_loss,
    meta_copy,
    token_output,
    token_targets,
)
from windlass.schema import OpKind
from windlass.sparsity import SECTION_ACTIVATION, SectionSizes

_aten = torch.ops.aten


class ConvolutionProduct(NamedTuple):
    """One of the matrix products of a convolution or of its backward pass."""

    name: str
    sizes: tuple[int, int, int, int]
    """Batch, m, n, k, of which the batch is that of groups."""


def convolution_products(
    call: OpOverload, args: Sequence[Any], outputs: Sequence[Tensor]
) -> tuple[ConvolutionProduct, ...]:
    """The products of a convolution, as many FLOP as `torch.utils.flop_counter` counts.

    Forward is one, of all windows with all filters. Backward is one for the gradient of the input,
    if that is asked for, and one for that of the filters.

    Returns:
        Nothing for any other call.
    """
    packet = call.overloadpacket
    if packet is _aten.convolution:
        weight, groups, is_transposed = args[1], args[8], args[6]
        windows = args[0] if is_transposed else outputs[0]
        return (ConvolutionProduct("convolution", _sizes(windows, weight, groups)),)
    if packet is _aten.convolution_backward:
        return tuple(_backward_products(args))
    return ()


def _backward_products(args: Sequence[Any]) -> Iterator[ConvolutionProduct]:
    gradient, x, weight, is_transposed, groups, wanted = *args[:3], *(args[i] for i in (7, 9, 10))
    batch, m, n, k = _sizes(x if is_transposed else gradient, weight, groups)
    if wanted[0]:
        yield ConvolutionProduct("convolution_input_grad", (batch, m, k, n))
    if wanted[1]:
        yield ConvolutionProduct("convolution_weight_grad", (batch, n, k, m))


def _sizes(windows: Tensor, weight: Tensor, groups: int) -> tuple[int, int, int, int]:
    """Groups; windows; filters of a group; numbers in a filter.

    Args:
        windows: has one element for each window and filter, `[b filters ...]`; of a transposed
            convolution its input.
        weight: `[filters numbers ...]`.
        groups: parts of the channels that do not mix.
    """
    count = windows.shape[0] * prod(windows.shape[2:])
    return groups, count, weight.shape[0] // groups, prod(weight.shape[1:])


_DEVICE = torch.ops.prim.device.default
"""Torch asks each fake tensor for its device many times a call: three of four calls are this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedPass:
    """A trace and its numbers at one micro-batch and sequence length."""

    trace: LayerTrace
    numbers: tuple[int, ...]
    """Numbers by the indices that the trace uses."""
    output_shape: tuple[int, ...]
    """Shape of the layer's output, before any loss."""


def record_layer(
    layer: nn.Module,
    make_input: Callable[[], Tensor],
    *,
    dtype: torch.dtype,
    is_first: bool = False,
    target_shape: tuple[int, ...] | None,
    target_dtype: torch.dtype = torch.int64,
    selective: bool = False,
    fused: bool = False,
) -> RecordedPass:
    """Records the forward and backward pass of a layer.

    Args:
        layer: a layer on any device; its weights are not touched.
        make_input: makes the layer's input; it is called under a fake tensor mode.
        dtype: type of weights and activations.
        is_first: whether the input is what the data give, of which no gradient is computed.
        target_shape: shape of the targets of the loss, which follows the last layer; None for any
            other layer.
        selective: whether the layer runs with selective activation checkpointing.
        fused: whether the loss is fused with the last projection; the output is the loss then.
    """
    targets_name = None
    if fused:
        layer = meta_copy(layer)
        targets_name = fuse_loss(layer)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
        state = fake_state(layer, dtype)
        x = make_input()
        x = x.to(dtype).requires_grad_(not is_first) if x.is_floating_point() else x
        targets = None if target_shape is None else torch.zeros(target_shape, dtype=target_dtype)
        weights = {id(w): w for w in state.values() if w.requires_grad}
        recorder = _Recorder()
        recorder.set_role(state.values(), "parameter")
        recorder.set_role([x] if targets is None else [x, targets], "input")
        if targets is not None and targets_name is not None:
            has_both = has_sentence_head(layer)
            state[targets_name] = token_targets(targets) if has_both else targets
        with recorder:
            y = _forward(layer, state, x, selective=selective)
            shape = tuple(token_output(y).shape)
            if targets is not None and (targets_name is None or has_sentence_head(layer)):
                y = layer_loss(layer)(y, targets)
        recorder.end_forward([y])
        output_gradient = torch.empty_like(y)
        recorder.set_role([output_gradient], "output_gradient")
        wanted = [*([x] if x.requires_grad else []), *weights.values()]
        gradients: tuple[Tensor | None, ...] = ()
        if wanted and y.requires_grad:
            with recorder:
                gradients = torch.autograd.grad(y, wanted, output_gradient, allow_unused=True)
        weight_gradients = gradients[1:] if x.requires_grad else gradients
        recorder.set_role([g for g in weight_gradients if g is not None], "parameter_gradient")
        return recorder.finish(x, y, shape)


def _forward(layer: nn.Module, state: dict[str, Tensor], x: Tensor, *, selective: bool) -> Tensor:
    def run(x: Tensor) -> Tensor:
        return functional_call(layer, state, (x,))

    return checkpoint_selectively(run, x, preserve_rng=False) if selective else run(x)


class _Recorder(TorchDispatchMode):
    """Records every ATen call and collective, and when each storage is freed."""

    def __init__(self) -> None:
        super().__init__()
        self._trace = TraceBuilder()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing that is recorded is compiled, and torch's guard takes a fifth of a capture."""
        return False

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401  whatever ATen takes and gives
        if func is _DEVICE:
            return args[0].device
        out = func(*args, **(kwargs or {}))
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if outputs and isinstance(func, OpOverload):
            inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            self._record(func, args, kwargs or {}, inputs, outputs)
        return out

    def set_role(self, tensors: Iterable[Tensor], role: BufferRole) -> None:
        """Sets the role of the buffers of some tensors."""
        self._trace.set_role([self._buffer(tensor) for tensor in tensors], role)

    def end_forward(self, outputs: Sequence[Tensor]) -> None:
        """Marks the end of the forward pass; all later calls belong to the backward pass."""
        self._trace.end_forward([self._buffer(tensor) for tensor in outputs])

    def finish(self, x: Tensor, y: Tensor, shape: tuple[int, ...]) -> RecordedPass:
        """The recorded pass."""
        trace = self._trace.finish(input_bytes=touched_bytes(x), output_bytes=touched_bytes(y))
        return RecordedPass(trace=trace, numbers=tuple(self._trace.numbers), output_shape=shape)

    def _record(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any],
        inputs: list[Tensor], outputs: list[Tensor],
    ) -> None:  # fmt: skip
        trace = self._trace
        old = {trace.known_buffer(tensor.untyped_storage()) for tensor in inputs}
        mutates = func._schema.is_mutable  # noqa: SLF001  there is no public way to ask
        fresh = [
            tensor
            for tensor in outputs
            if mutates or trace.known_buffer(tensor.untyped_storage()) not in old
        ]
        if not fresh:
            return  # a view
        if func.overloadpacket in ALLOCATIONS:
            for tensor in fresh:
                self._buffer(tensor)
            return
        if (section := section_sizes(func, args)) is not None:
            self._section(section, inputs, fresh)
            return
        if products := convolution_products(func, args, outputs):
            self._convolution(products, inputs, fresh)
            return
        if func.overloadpacket in HIDDEN_IN_PLACE:
            # The output has the buffer of the input that it would have overwritten.
            trace.share_buffer(outputs[0].untyped_storage(), self._buffer(inputs[0]))
        reads = tuple(
            self._access(tensor, nbytes) for tensor, nbytes in read_tensors(func, inputs, outputs)
        )
        scratch = None
        if (sizes := fused_loss_sizes(func, inputs)) is not None:
            scratch = self._softmax(sizes, tokens=len(inputs[0]))
            reads += (self._access(scratch, 0),)
        writes = tuple(self._access(tensor, touched_bytes(tensor)) for tensor in fresh)
        collective = collective_call(func, args, outputs)
        call = self._call(func, inputs, outputs, reads, writes)
        if call.kind == "attention" and not takes_causal_mask(func, args, kwargs):
            call = replace(call, is_causal=False)
        if collective is not None:
            kind, axis, nbytes = collective
            call = replace(call, kind="collective", collective=(kind, axis, trace.number(nbytes)))
        trace.add_call(call)

    def _section(
        self, sizes: SectionSizes, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        """Records a feed-forward section as what it moves and its products, one after the other."""
        scratch = torch.empty(sizes.scratch_bytes, dtype=torch.uint8)
        reads = tuple(self._access(tensor, touched_bytes(tensor)) for tensor in inputs)
        reads += (self._access(scratch, 0),)
        moved = (self._access(scratch, sizes.moved_bytes),)
        writes = tuple(self._access(tensor, touched_bytes(tensor)) for tensor in outputs)
        number = self._trace.number
        self._trace.add_call(
            TracedCall(
                name=SECTION_ACTIVATION, kind="memory", flop=number(0), matmul_sizes=None,
                reads=(), writes=moved, random=False,
            )
        )  # fmt: skip
        for product in sizes.products:
            batch, m, n, k = map(number, product.sizes)
            self._trace.add_call(
                TracedCall(
                    name=product.name, kind="matmul", flop=number(product.flop),
                    matmul_sizes=(batch, m, n, k), reads=reads, writes=writes, random=False,
                    kept=(sizes.block, product.kept),
                )
            )  # fmt: skip

    def _convolution(
        self, products: Sequence[ConvolutionProduct], inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
    ) -> None:  # fmt: skip
        """Records the matrix products that a convolution is, one after the other."""
        number = self._trace.number
        reads = tuple(self._access(tensor, touched_bytes(tensor)) for tensor in inputs)
        writes = tuple(self._access(tensor, touched_bytes(tensor)) for tensor in outputs)
        for product in products:
            batch, m, n, k = map(number, product.sizes)
            self._trace.add_call(
                TracedCall(
                    name=product.name, kind="matmul", flop=number(prod((2, *product.sizes))),
                    matmul_sizes=(batch, m, n, k), reads=reads, writes=writes, random=False,
                )
            )  # fmt: skip

    def _softmax(self, sizes: FusedLossSizes, *, tokens: int) -> Tensor:
        """Records what a fused loss moves in its scratch memory, which lives until it is done."""
        scratch = torch.empty(sizes.scratch_bytes, dtype=torch.uint8)
        self._trace.add_call(
            TracedCall(
                name=FUSED_SOFTMAX,
                kind="memory",
                flop=self._trace.number(0),
                matmul_sizes=None,
                reads=(),
                writes=(self._access(scratch, tokens * sizes.moved_bytes),),
                random=False,
            )
        )
        return scratch

    def _call(
        self, func: OpOverload, inputs: list[Tensor], outputs: list[Tensor],
        reads: tuple[BufferAccess, ...], writes: tuple[BufferAccess, ...],
    ) -> TracedCall:  # fmt: skip
        name, number = func.overloadpacket.__name__, self._trace.number
        random = torch.Tag.nondeterministic_seeded in func.tags
        sparse = sparse_product(func, inputs, outputs) if inputs else None
        sizes = matmul_sizes(func, inputs) if sparse is None else sparse.sizes
        if sizes is not None:
            batch, m, n, k = (number(size) for size in sizes)
            flop = number(prod((2, *sizes)) if sparse is None else sparse.flop)
            return TracedCall(
                name=name, kind="matmul", flop=flop, matmul_sizes=(batch, m, n, k), reads=reads,
                writes=writes, random=random, kept=sparse and (sparse.block, sparse.kept),
            )  # fmt: skip
        count = attention_flop(func, inputs)
        kind: OpKind = "memory" if count is None else "attention"
        return TracedCall(
            name=name, kind=kind, flop=number(count or 0), matmul_sizes=None, reads=reads,
            writes=writes, random=random,
        )  # fmt: skip

    def _access(self, tensor: Tensor, nbytes: int) -> BufferAccess:
        storage = tensor.untyped_storage()
        return self._trace.access(storage, storage.nbytes(), nbytes)

    def _buffer(self, tensor: Tensor) -> int:
        """Index of a tensor's buffer, which is added if it is new."""
        storage = tensor.untyped_storage()
        return self._trace.buffer(storage, storage.nbytes())
