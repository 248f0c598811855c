"""Counts for one ATen call: floating-point operations, and the bytes it really touches."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from windlass.models import FusedLossSizes
from windlass.schema import CollectiveKind, TensorAxis
from windlass.sparsity import SectionSizes

_aten = torch.ops.aten

_PRODUCTS: dict[OpOverloadPacket, int] = {
    _aten.mm: 0, _aten.bmm: 0, _aten.addmm: 1, _aten.baddbmm: 1,
}  # fmt: skip
"""Matrix products, and the index of the left factor among their tensors."""

_SPARSE_PRODUCTS = frozenset({"windlass::block_linear", "windlass::block_linear_input_grad"})
_SPARSE_WEIGHT_GRADIENT = "windlass::block_linear_weight_grad"
"""Operators of `windlass.sparsity.block_linear`."""

_GROUPED_PRODUCTS = frozenset({"windlass::grouped_linear", "windlass::grouped_linear_input_grad"})
_GROUPED_WEIGHT_GRADIENT = "windlass::grouped_linear_weight_grad"
"""Operators of `models.experts.grouped_products`: each row is multiplied with one expert's."""

_FUSED_LOSS = "windlass::linear_cross_entropy_grads"
"""Operator of `models.fused_loss`: the loss, and the gradients of both factors of the logits."""

_FUSED_ATTENTION = "_scaled_dot_product_"
"""Prefix of the names of torch's fused attention kernels on every device."""

_GATHERS: frozenset[OpOverloadPacket] = frozenset({
    _aten.embedding, _aten.gather, _aten.index_select, _aten.index, _aten.nll_loss_forward,
})  # fmt: skip
"""Calls that read only the rows of their first tensor that an index picks."""

_SHAPE_ONLY: frozenset[OpOverloadPacket] = frozenset({
    _aten.nll_loss_backward, _aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.new_zeros,
    _aten.new_full,
})  # fmt: skip
"""Calls that read only the shape, not the values, of a tensor of their output's shape."""

_OVERWRITES: frozenset[OpOverloadPacket] = frozenset({_aten.zero_, _aten.fill_, _aten.copy_})
"""In-place calls that do not read the values they overwrite."""

_COLLECTIVES: dict[str, CollectiveKind] = {
    "windlass::all_gather": "all_gather",
    "windlass::reduce_scatter": "reduce_scatter",
    "windlass::all_reduce": "all_reduce",
    "windlass::all_reduce_identity_grad": "all_reduce",
    "windlass::all_reduce_max": "all_reduce",
}
"""Kinds of the operators that `models.tensor_parallel.collectives` defines."""

HIDDEN_IN_PLACE: frozenset[OpOverloadPacket] = frozenset({_aten.scatter_add})
"""Calls that autograd makes in place, on their first tensor, unless a dispatch mode is active.

Source: `gather_backward` in torch's FunctionsManual.cpp, which chooses the out-of-place variant for
tensor subclasses and modes.
"""

ALLOCATIONS: frozenset[OpOverloadPacket] = frozenset({
    _aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided,
})  # fmt: skip
"""Calls that allocate memory and do not touch it."""


def matmul_sizes(call: OpOverload, tensors: Sequence[Tensor]) -> tuple[int, int, int, int] | None:
    """Batch, m, n, k of a matrix product; None for any other call.

    A fused loss is three products of the size of the logits': they and both gradients.
    """
    if call.name() == _FUSED_LOSS:
        return 3, len(tensors[0]), *tensors[1].shape
    if call.name() in _GROUPED_PRODUCTS:
        rows, weight = tensors[0], tensors[1]
        outputs = prod(weight.shape[1:]) // rows.shape[1]
        return 1, rows.shape[0], outputs, rows.shape[1]
    if call.name() == _GROUPED_WEIGHT_GRADIENT:
        gradient, x = tensors[0], tensors[1]
        return 1, gradient.shape[1], x.shape[1], x.shape[0]
    index = _PRODUCTS.get(call.overloadpacket)
    if index is None:
        return None
    left, right = tensors[index], tensors[index + 1]
    batch = left.shape[0] if left.ndim == 3 else 1
    return batch, left.shape[-2], right.shape[-1], left.shape[-1]


class SparseProduct(NamedTuple):
    """A product with a weight of kept blocks."""

    sizes: tuple[int, int, int, int]
    """Batch, m, n, k of the dense product."""
    block: int
    """Side of a block."""
    kept: int
    """Elements of all kept blocks."""
    flop: int
    """`2 tokens kept`."""


def sparse_product(
    call: OpOverload, tensors: Sequence[Tensor], outputs: Sequence[Tensor]
) -> SparseProduct | None:
    """The product with a weight of kept blocks that a call computes; None for any other call."""
    name, first = call.name(), tensors[0]
    tokens = prod(first.shape[:-1])
    if name in _SPARSE_PRODUCTS:
        sizes, blocks = (1, tokens, outputs[0].shape[-1], first.shape[-1]), tensors[1]
    elif name == _SPARSE_WEIGHT_GRADIENT:
        sizes, blocks = (1, first.shape[-1], tensors[1].shape[-1], tokens), outputs[0]
    else:
        return None
    kept = blocks.numel()
    return SparseProduct(sizes, blocks.shape[-1], kept, 2 * tokens * kept)


def section_sizes(call: OpOverload, args: Sequence[Any]) -> SectionSizes | None:
    """Sizes of a pass of a feed-forward section; None for any other call."""
    backward = call.name() == "windlass::block_feed_forward_grads"
    if backward:
        _, x, _, up, _, down, _, inner, _ = args
    elif call.name() == "windlass::block_feed_forward":
        x, up, _, _, down, _, _, inner, _, _ = args
    else:
        return None
    *tokens, width = x.shape
    return SectionSizes(
        prod(tokens), width, inner, up.numel(), down.numel(), up.shape[-1], x.element_size(),
        backward,
    )  # fmt: skip


def fused_loss_sizes(call: OpOverload, tensors: Sequence[Tensor]) -> FusedLossSizes | None:
    """Sizes of a fused loss; None for any other call."""
    if call.name() != _FUSED_LOSS:
        return None
    vocabulary, width = tensors[1].shape
    return FusedLossSizes(vocabulary, width, tensors[1].element_size())


def attention_flop(call: OpOverload, tensors: Sequence[Tensor]) -> int | None:
    """FLOP of fused attention; None for any other call.

    Forward is two products, `q k^T` and `p v`; backward is five, because it recomputes `q k^T`. A
    causal mask does not halve them, as in `torch.utils.flop_counter`.
    """
    name = call.overloadpacket.__name__
    if not name.startswith(_FUSED_ATTENTION):
        return None
    if name.endswith("_backward"):
        query, key, value = tensors[1:4]
        score_products, value_products = 3, 2
    else:
        query, key, value = tensors[:3]
        score_products, value_products = 1, 1
    pairs = prod(query.shape[:-1]) * key.shape[-2]
    return 2 * pairs * (score_products * query.shape[-1] + value_products * value.shape[-1])


def takes_causal_mask(call: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of fused attention keeps each token from seeing later ones."""
    names = [argument.name for argument in call._schema.arguments]  # noqa: SLF001  no public way
    return bool(dict(zip(names, args, strict=False)).get("is_causal", kwargs.get("is_causal")))


def collective_call(
    call: OpOverload, args: Sequence[Any], outputs: Sequence[Tensor]
) -> tuple[CollectiveKind, TensorAxis, int] | None:
    """Kind and axis of a collective and the bytes of its full buffer; None for any other call."""
    kind = _COLLECTIVES.get(call.name())
    if kind is None:
        return None
    source, _, _, axis, _ = args
    full: Tensor = outputs[0] if kind == "all_gather" else source
    return kind, axis, full.numel() * full.element_size()


def read_tensors(
    call: OpOverload, tensors: Sequence[Tensor], outputs: Sequence[Tensor]
) -> list[tuple[Tensor, int]]:
    """Tensors that the call reads, with the bytes it touches of each."""
    packet = call.overloadpacket
    if packet in _OVERWRITES or packet in _SHAPE_ONLY:
        written = {id(tensor) for tensor in outputs}
        shapes = {tensor.shape for tensor in outputs}
        tensors = [t for t in tensors if id(t) not in written and t.shape not in shapes]
    # An operand that occurs twice is read once.
    distinct = {(_storage_key(t), t.storage_offset(), t.shape, t.stride()): t for t in tensors}
    touched = [(tensor, touched_bytes(tensor)) for tensor in distinct.values()]
    if packet in _GATHERS and touched:
        table, index = tensors[0], tensors[1]
        picked = index.numel() if packet is _aten.nll_loss_forward else outputs[0].numel()
        touched[0] = (table, picked * table.element_size())
    return touched


def touched_bytes(tensor: Tensor) -> int:
    """Bytes of distinct elements; broadcast elements count once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return prod(size for size, stride in sizes if stride or size == 0) * tensor.element_size()


def _storage_key(tensor: Tensor) -> int:
    """Identifies the memory of a live tensor."""
    return id(tensor.untyped_storage())
