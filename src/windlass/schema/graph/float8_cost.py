"""The cost of a layer whose linear layers multiply 8-bit factors, from its cost in bfloat16.

The output and the gradient of the input multiply float8 factors, which are made before each of
these products; gradients of weights, attention and all else stay in bfloat16. See
`windlass.models.float8`, which runs them.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from windlass.schema.graph.layer_cost import Collective, LayerCost, MatmulShape, Op, Polynomial

_TILE = 16
"""Sides of float8 products are multiples of it."""
_EAGER_READ, _EAGER_WRITTEN, _EAGER_CALLS = 13, 11, 11
"""Bytes that the operations of one factor read and write for each element, and their number:
magnitude, largest, scale, product, clamp, two casts and the division back."""
_FUSED_READ, _FUSED_WRITTEN, _FUSED_CALLS = 5, 3, 2
"""The same of compiled code: a reduction, and one kernel that rounds."""
_LARGEST_BYTES = 2
"""Bytes of a largest value, in bfloat16."""
_LIVE_BYTES = 3
"""Bytes for each element of a factor while a product runs: in float8, and scaled back."""


class SharedSums(NamedTuple):
    """Products whose sums tensor-parallel ranks share, each by the sides `(k, n)` of its weight."""

    forward: Sequence[tuple[int, ...]]
    backward: Sequence[tuple[int, ...]]
    """Products that give the gradient of an input."""


def float8_cost(
    cost: LayerCost,
    adapters: frozenset[tuple[int, ...]],
    shared: SharedSums,
) -> LayerCost:
    """The cost of a hidden layer in float8.

    Args:
        cost: its cost in bfloat16.
        adapters: shapes of the factors of adapters, whose products stay in bfloat16.
        shared: products whose sums tensor-parallel ranks share, which exchange the largest values
            of their rows.
    """
    passes = {
        name: tuple(_in_float8(ops, adapters, Counter(sums), compiled=cost.compiled))
        for name, ops, sums in (
            ("forward", cost.forward, shared.forward),
            ("backward", cost.backward, shared.backward),
        )
    }
    return cost.model_copy(update={"precision": "float8", **passes})


def bfloat16_in_float8(cost: LayerCost) -> LayerCost:
    """The cost of the first or the last layer of a float8 model, which stays in bfloat16."""
    forward, backward = (tuple(_stays(op) for op in ops) for ops in (cost.forward, cost.backward))
    update = {"precision": "float8", "forward": forward, "backward": backward}
    return cost.model_copy(update=update)


def _in_float8(
    ops: Iterable[Op],
    adapters: frozenset[tuple[int, ...]],
    shared: Counter[tuple[int, ...]],
    *,
    compiled: bool,
) -> Iterator[Op]:
    """Operations of one pass; `shared` counts the sums in it that are not yet exchanged."""
    for op in ops:
        product = None if op.shape is None or op.kept is not None else _linear_product(op.shape)
        if product is None or adapters & {product.weight, product.weight[::-1]}:
            yield _stays(op)
            continue
        summed, other = product.weight
        elements = _sum(_scaled(product.tokens, summed), Polynomial(summed * other))
        read, written, calls = (
            (_FUSED_READ, _FUSED_WRITTEN, _FUSED_CALLS)
            if compiled
            else (_EAGER_READ, _EAGER_WRITTEN, _EAGER_CALLS)
        )
        live = _sum(op.live_bytes, _scaled(elements, _LIVE_BYTES))
        yield Op(
            name="float8", kind="memory", read_bytes=_scaled(elements, read),
            written_bytes=_scaled(elements, written), live_bytes=live, calls=2 * calls,
        )  # fmt: skip
        if shared[product.weight] > 0:
            shared[product.weight] -= 1
            largest = _scaled(_sum(product.tokens, Polynomial(other)), _LARGEST_BYTES)
            yield Op(
                name="float8 largest", kind="collective", read_bytes=largest,
                written_bytes=largest, live_bytes=live,
                collective=Collective("all_reduce", largest),
            )  # fmt: skip
        yield op.model_copy(update={"precision": "float8", "live_bytes": live})


class _LinearProduct(NamedTuple):
    """A product of tokens with a weight."""

    tokens: Polynomial
    weight: tuple[int, int]
    """Sides of the weight; the product sums over the first."""


def _linear_product(shape: MatmulShape) -> _LinearProduct | None:
    """A linear layer's product whose sides are multiples of 16; None for any other product.

    One factor is a weight, whose sides are fixed, and the other has a row for each token.
    """
    if shape.batch != Polynomial(1.0):
        return None
    fixed = [side for side in (shape.m, shape.n, shape.k) if side == Polynomial(side.constant)]
    if shape.k not in fixed or len(fixed) != 2 or any(side.constant % _TILE for side in fixed):
        return None
    wide = shape.n if shape.m not in fixed else shape.m
    tokens = shape.m if shape.m not in fixed else shape.n
    return _LinearProduct(tokens, (int(shape.k.constant), int(wide.constant)))


def _stays(op: Op) -> Op:
    """A product that takes factors in bfloat16; any other operation itself."""
    is_product = op.shape is not None and op.precision is None
    return op.model_copy(update={"precision": "bfloat16"}) if is_product else op


def _scaled(polynomial: Polynomial, factor: float) -> Polynomial:
    return Polynomial(*(factor * coefficient for coefficient in polynomial))


def _sum(first: Polynomial, second: Polynomial) -> Polynomial:
    return Polynomial(*map(sum, zip(first, second, strict=True)))
