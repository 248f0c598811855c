"""Multi-head self-attention as one tensor-parallel rank runs it."""

from collections.abc import Sequence
from functools import partial
from math import prod

from windlass.capture.analytic.autograd import attach, kept_outputs, new_node, only
from windlass.capture.analytic.modules.linears import Column, Row
from windlass.capture.analytic.modules.norms import rms_norm
from windlass.capture.analytic.ops.collectives import all_gather, reduce_scatter
from windlass.capture.analytic.ops.elementwise import (
    add,
    arange,
    cast,
    mul,
    scale,
    sub,
    tanh,
    unary,
)
from windlass.capture.analytic.ops.matrix_products import bmm
from windlass.capture.analytic.ops.views import cat, flatten, reshape, split, transpose, unsqueeze
from windlass.capture.analytic.scope import Scope
from windlass.capture.analytic.strides import dense_strides, permuted_strides
from windlass.capture.analytic.tensor import Gradients, Needs, Tensor


class Attention:
    """Multi-head self-attention."""

    def __init__(self, scope: Scope) -> None:
        config, rank = scope.config, scope.rank
        divides = config.heads % rank.degree == 0 and config.kv_heads % rank.degree == 0
        self.rank = rank
        self.head_width = config.head_width
        self.rotated, self.scaling = config.rotated_width, config.rope_scaling
        self.causal, self.window = config.causal, config.sliding_window
        self.softcap = config.attention_softcap
        self.is_centered = config.norm == "zero_centered_rms"
        self.head_counts = [
            heads // (rank.degree if divides else rank.rows)
            for heads in (config.heads, config.kv_heads, config.kv_heads)
        ]
        unit, bias = config.head_width, config.attention_bias
        widths = [heads * unit for heads in (config.heads, config.kv_heads, config.kv_heads)]
        inner = scope.inner("input")
        self.input = Column(inner, "attention", widths, unit, bias=bias, divides=divides)
        self.norms = [
            scope.inner(name).parameter("weight", (config.head_width,))
            for name in (("query_norm", "key_norm") if config.qk_norm else ())
        ]
        inner, bias = scope.inner("output"), config.has_projection_bias
        self.output = Row(inner, "projection", widths[0], unit, bias=bias, divides=divides)

    def __call__(self, x: Tensor) -> Tensor:
        """`[b s/r d/c]` to the same; the tokens are gathered, and scattered again."""
        full = all_gather(x, self.rank.token_group)
        y = self._forward(full)
        return reduce_scatter(y, self.rank.token_group)

    def _forward(self, x: Tensor) -> Tensor:
        parts = split(self.input(x), [heads * self.head_width for heads in self.head_counts], 2)
        query, key, value = (
            reshape(part, (*part.shape[:2], heads, self.head_width))
            for part, heads in zip(parts, self.head_counts, strict=True)
        )
        if self.norms:
            query, key = (
                rms_norm(part, weight, is_centered=self.is_centered)
                for part, weight in zip((query, key), self.norms, strict=True)
            )
        query, key, value = (transpose(part, 1, 2) for part in (query, key, value))
        if self.rotated:
            query, key = self._rotated(query, key)
        mixed = self._attend(query, key, value)
        return self.output(flatten(transpose(mixed, 1, 2), 2, 3))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        is_masked = self.window is not None or self.softcap is not None
        mask = self._mask(query) if is_masked else None
        if self.softcap is not None:
            return capped_attention(query, key, value, mask)
        return fused_attention(query, key, value, mask, causal=self.causal)

    def _mask(self, query: Tensor) -> Tensor | None:
        if self.window is None and not self.causal:
            return None
        hidden = Tensor(query.tape, (query.shape[2], query.shape[2]), query.dtype)
        query.tape.call("full", [], [hidden])
        later = unary("triu", hidden)
        return later if self.window is None else add(later, unary("tril", hidden))

    def _rotated(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        steps = arange(query.tape, self.rotated // 2)
        positions = arange(query.tape, query.shape[2])
        column = unsqueeze(positions, 1)
        angles = mul(column, self._frequencies(steps))
        cos = cast(self._magnified(unary("cos", angles)), query.dtype)
        sin = cast(self._magnified(unary("sin", angles)), query.dtype)
        return self._rotate(query, cos, sin), self._rotate(key, cos, sin)

    def _frequencies(self, steps: Tensor) -> Tensor:
        plain = unary("pow", unary("div", unary("neg", steps)))
        if self.scaling is None:
            return plain
        if self.scaling.type == "linear":
            return unary("div", plain)
        source = plain if self.scaling.type == "llama3" else steps
        kept = unary("clamp", unary("add", unary("mul", source)))
        return mul(plain, unary("add", unary("mul", kept)))

    def _magnified(self, x: Tensor) -> Tensor:
        is_plain = self.scaling is None or self.scaling.magnitude == 1
        return x if is_plain else unary("mul", x)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half, rest = self.rotated // 2, self.head_width - self.rotated
        first, second, *unrotated = split(x, [half, half, rest] if rest else [half, half], 3)
        rotated = (
            sub(mul(first, cos), mul(second, sin)), add(mul(second, cos), mul(first, sin)),
        )  # fmt: skip
        return cat((*rotated, *unrotated), 3)


def capped_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Attention in plain products, whose scores stay below a cap."""
    shape, groups = query.shape, key.shape[0] * key.shape[1]
    repeats = query.shape[1] // key.shape[1]
    rows = groups, repeats * shape[2], shape[3]
    query = reshape(query, rows)
    key, value = (reshape(part, (groups, *part.shape[2:])) for part in (key, value))
    scores = scale(tanh(bmm(scale(query), transpose(key, 1, 2))))
    scores = reshape(scores, (groups, repeats, shape[2], shape[2]))
    if mask is not None:
        scores = add(scores, mask)
    mixed = bmm(flatten(softmax(scores), 1, 2), value)
    return reshape(mixed, shape)


_Saved = Sequence[Tensor]
_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


def fused_attention(
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
