"""Fused attention, and the softmax of attention in plain products."""

from collections.abc import Sequence
from functools import partial
from math import prod

from windlass.capture.analytic.autograd import attach, kept_outputs, new_node, only
from windlass.capture.analytic.strides import dense_strides, permuted_strides
from windlass.capture.analytic.tensor import Gradients, Needs, Tensor

_Saved = Sequence[Tensor]
_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *, causal: bool
) -> Tensor:
    """Fused attention of `[b h s k]` on `[b g s k]`, with a mask `[s s]` or the causal one."""
    is_causal = None if causal and mask is None else False
    inputs = [query, key, value, *(() if mask is None else (mask,))]
    backward = partial(_attention_backward, is_causal)
    node = new_node((query, key, value), backward, inputs)
    out, logsumexp = kept_outputs(query, lambda: _attention(is_causal, inputs))
    if node is not None:
        node.save([out, logsumexp], query.tape)
    return attach(node, out)


def _attention(is_causal: bool | None, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    query, key, value = inputs[:3]
    out = Tensor(query.tape, query.shape, query.dtype, dense_strides(query.shape, query.strides))
    logsumexp = Tensor(query.tape, query.shape[:-1], "float32")
    flop = _attention_flop(query, key, value, 1, 1)
    out.tape.call(
        _ATTENTION, inputs, [out, logsumexp], kind="attention", flop=flop, random=True,
        is_causal=is_causal,
    )  # fmt: skip
    return out, logsumexp


def _attention_backward(
    is_causal: bool | None, gradients: Gradients, saved: _Saved, _: Needs
) -> list[Tensor]:
    query, key, value, *masks, out, logsumexp = saved
    inner = [
        Tensor(x.tape, x.shape, x.dtype, permuted_strides(x.shape, (0, 2, 1, 3)))
        for x in (query, key, value)
    ]
    flop = _attention_flop(query, key, value, 3, 2)
    reads = [only(gradients), query, key, value, out, logsumexp, *masks]
    query.tape.call(
        f"{_ATTENTION}_backward", reads, inner, kind="attention", flop=flop, is_causal=is_causal
    )
    return inner


def _attention_flop(
    query: Tensor, key: Tensor, value: Tensor, score_products: int, value_products: int
) -> int:
    pairs = prod(query.shape[:-1]) * key.shape[-2]
    return 2 * pairs * (score_products * query.shape[-1] + value_products * value.shape[-1])


def softmax(x: Tensor) -> Tensor:
    """Softmax over the last dimension."""
    node = new_node((x,), _softmax_backward)
    out = Tensor(x.tape, x.shape, x.dtype)
    x.tape.call("_softmax", [x], [out])
    if node is not None:
        node.save([out], x.tape)
    return attach(node, out)


def _softmax_backward(gradients: Gradients, saved: _Saved, _: Needs) -> list[Tensor]:
    (result,) = saved
    out = Tensor(result.tape, result.shape, result.dtype)
    result.tape.call("_softmax_backward_data", [only(gradients), result], [out])
    return [out]
