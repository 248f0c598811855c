"""The cost of a layer whose linear layers multiply 8-bit factors, from its cost in bfloat16.

The output and the gradient of the input multiply float8 factors, which are made before each of
these products; gradients of weights, attention and all else stay in bfloat16. See
`windlass.torch_ext.float8_products`, which runs them.
"""

from collections.abc import Iterable, Iterator

from windlass.schema.graph.layer_cost import LayerCost, MatmulShape, Op, Polynomial

_TILE = 16
"""Sides of float8 products are multiples of it."""
_EAGER_READ, _EAGER_WRITTEN, _EAGER_CALLS = 13, 11, 11
"""Bytes that the operations of one factor read and write for each element, and their number:
magnitude, largest, scale, product, clamp, two casts and the division back."""
_FUSED_READ, _FUSED_WRITTEN, _FUSED_CALLS = 5, 3, 2
"""The same of compiled code: a reduction, and one kernel that rounds."""
_LIVE_BYTES = 3
"""Bytes for each element of a factor while a product runs: in float8, and scaled back."""


def float8_cost(cost: LayerCost) -> LayerCost:
    """The cost of a hidden layer in float8.

    Args:
        cost: its cost in bfloat16.
    """
    return cost.model_copy(
        update={
            "precision": "float8",
            "forward": tuple(_in_float8(cost.forward, compiled=cost.compiled)),
            "backward": tuple(_in_float8(cost.backward, compiled=cost.compiled)),
        }
    )


def bfloat16_in_float8(cost: LayerCost) -> LayerCost:
    """The cost of the first or the last layer of a float8 model, which stays in bfloat16."""
    forward, backward = (tuple(_stays(op) for op in ops) for ops in (cost.forward, cost.backward))
    update = {"precision": "float8", "forward": forward, "backward": backward}
    return cost.model_copy(update=update)


def _in_float8(ops: Iterable[Op], *, compiled: bool) -> Iterator[Op]:
    for op in ops:
        elements = None if op.shape is None or op.kept is not None else _factors(op.shape)
        if elements is None:
            yield _stays(op)
            continue
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
        yield op.model_copy(update={"precision": "float8", "live_bytes": live})


def _factors(shape: MatmulShape) -> Polynomial | None:
    """Elements of both factors of a linear layer's product; None for any other product.

    One factor is a weight, whose sides are fixed, and the other has a row for each token.
    """
    if shape.batch != Polynomial(1.0):
        return None
    fixed = [side for side in (shape.m, shape.n, shape.k) if side == Polynomial(side.constant)]
    if shape.k not in fixed or len(fixed) != 2 or any(side.constant % _TILE for side in fixed):
        return None
    wide = shape.n if shape.m not in fixed else shape.m
    tokens = shape.m if shape.m not in fixed else shape.n
    weight = Polynomial(wide.constant * shape.k.constant)
    return _sum(_scaled(tokens, shape.k.constant), weight)


def _stays(op: Op) -> Op:
    """A product that takes factors in bfloat16; any other operation itself."""
    is_product = op.shape is not None and op.precision is None
    return op.model_copy(update={"precision": "bfloat16"}) if is_product else op


def _scaled(polynomial: Polynomial, factor: float) -> Polynomial:
    return Polynomial(*(factor * coefficient for coefficient in polynomial))


def _sum(first: Polynomial, second: Polynomial) -> Polynomial:
    return Polynomial(*map(sum, zip(first, second, strict=True)))
