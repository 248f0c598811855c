"""What one ATen call costs: floating-point operations, and bytes it really touches."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from windlass.schema.graph import CollectiveKind
from windlass.schema.tensor_grid import TensorAxis

_aten = torch.ops.aten

_PRODUCTS: dict[OpOverloadPacket, int] = {
    _aten.mm: 0, _aten.bmm: 0, _aten.addmm: 1, _aten.baddbmm: 1,
}  # fmt: skip
"""Matrix products, and the place of the left factor among their tensors."""

_FUSED_ATTENTION = "_scaled_dot_product_"
"""How the names of torch's fused attention kernels begin, on every device."""

_GATHERS: frozenset[OpOverloadPacket] = frozenset({
    _aten.embedding, _aten.gather, _aten.index_select, _aten.index, _aten.nll_loss_forward,
})  # fmt: skip
"""Their first tensor is read only where an index points."""

_SHAPE_ONLY: frozenset[OpOverloadPacket] = frozenset({
    _aten.nll_loss_backward, _aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.new_zeros,
    _aten.new_full,
})  # fmt: skip
"""Of a tensor of their own shape they take nothing but the shape."""

_OVERWRITES: frozenset[OpOverloadPacket] = frozenset({_aten.zero_, _aten.fill_, _aten.copy_})
"""In place, without reading what was there."""

_COLLECTIVES: dict[str, CollectiveKind] = {
    "windlass::gather_parts": "all_gather",
    "windlass::scatter_sum": "reduce_scatter",
    "windlass::sum_slices": "all_reduce",
    "windlass::agree_sum": "all_reduce",
    "windlass::max_slices": "all_reduce",
}
"""What the slices of a layer exchange, by the names of `models.exchange`."""

HIDDEN_IN_PLACE: frozenset[OpOverloadPacket] = frozenset({_aten.scatter_add})
"""Autograd calls them in place, but not while somebody watches: on their first tensor, a fresh one.

Source: `gather_backward` in torch's FunctionsManual.cpp, whose two ways ask for a tensor subclass.
"""

ALLOCATIONS: frozenset[OpOverloadPacket] = frozenset({
    _aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided,
})  # fmt: skip
"""Allocate and touch nothing."""


def matmul_sizes(call: OpOverload, tensors: Sequence[Tensor]) -> tuple[int, int, int, int] | None:
    """Batch, m, n, k of a matrix product; None if the call is none."""
    place = _PRODUCTS.get(call.overloadpacket)
    if place is None:
        return None
    left, right = tensors[place], tensors[place + 1]
    batch = left.shape[0] if left.ndim == 3 else 1
    return batch, left.shape[-2], right.shape[-1], left.shape[-1]


def attention_flop(call: OpOverload, tensors: Sequence[Tensor]) -> int | None:
    """FLOP of fused attention; None if the call is none.

    Forward is two products, `q k^T` and `p v`; backward five, since it forms `q k^T` again. The
    causal half is not taken off: so counts `torch.utils.flop_counter`.
    """
    name = call.overloadpacket.__name__
    if not name.startswith(_FUSED_ATTENTION):
        return None
    if name.endswith("_backward"):
        query, key, value = tensors[1:4]
        scores, mixes = 3, 2
    else:
        query, key, value = tensors[:3]
        scores, mixes = 1, 1
    pairs = prod(query.shape[:-1]) * key.shape[-2]
    return 2 * pairs * (scores * query.shape[-1] + mixes * value.shape[-1])


def collective_call(
    call: OpOverload, args: Sequence[Any], made: Sequence[Tensor]
) -> tuple[CollectiveKind, TensorAxis, int] | None:
    """What slices exchange, which of them, and the bytes of the whole buffer; else None."""
    how = _COLLECTIVES.get(call.name())
    if how is None:
        return None
    taken, _, _, among, _ = args
    whole: Tensor = made[0] if how == "all_gather" else taken
    return how, among, whole.numel() * whole.element_size()


def read_tensors(
    call: OpOverload, tensors: Sequence[Tensor], out: Sequence[Tensor]
) -> list[tuple[Tensor, int]]:
    """What the call reads, with the bytes it touches of each."""
    packet = call.overloadpacket
    if packet in _OVERWRITES or packet in _SHAPE_ONLY:
        written = {id(tensor) for tensor in out}
        shapes = {tensor.shape for tensor in out}
        tensors = [t for t in tensors if id(t) not in written and t.shape not in shapes]
    # An operand that stands twice is read once.
    once = {(storage_key(t), t.storage_offset(), t.shape, t.stride()): t for t in tensors}
    touched = [(tensor, touched_bytes(tensor)) for tensor in once.values()]
    if packet in _GATHERS and touched:
        table, index = tensors[0], tensors[1]
        picked = index.numel() if packet is _aten.nll_loss_forward else out[0].numel()
        touched[0] = (table, picked * table.element_size())
    return touched


def touched_bytes(tensor: Tensor) -> int:
    """Bytes of distinct elements: what is broadcast counts once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return prod(size for size, stride in sizes if stride or size == 0) * tensor.element_size()


def storage_key(tensor: Tensor) -> int:
    """Tells the memory of living tensors apart."""
    return id(tensor.untyped_storage())
