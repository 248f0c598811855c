"""Measures products with weights of which only some blocks are kept."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from windlass.hardware.probe.matmul import DTYPES, TimedProduct, fit_terms
from windlass.hardware.probe.operands import ColdMemory
from windlass.hardware.probe.stopwatch import Stopwatch
from windlass.schema import PRECISION_BYTES, Precision, ProductRole, SparseProductRate
from windlass.sparsity import BlockPart, BlockSparseLinear

_BLOCKS = (16, 32, 64, 128)
_SHAPES = (
    (64, 1024, 1024, 2), (256, 2048, 1024, 4), (1024, 4096, 1024, 8), (1024, 1024, 4096, 8),
    (2048, 1024, 1024, 4), (1024, 2048, 8192, 8),
)  # fmt: skip
"""Tokens, outputs and inputs of layers, and the one of so many blocks of each row that is kept."""


def sparse_product_rates(
    precision: Precision, watch: Stopwatch, on_measured: Callable[[], None]
) -> tuple[SparseProductRate, ...]:
    """Times of products with kept blocks, for each side of a block and each role.

    Args:
        precision: precision of all operands.
        on_measured: called after each shape of each side.
    """
    rates: list[SparseProductRate] = []
    memory = ColdMemory(DTYPES[precision], watch.device)
    for block in _BLOCKS:
        timed: dict[ProductRole, list[TimedProduct]] = {}
        for shape in _SHAPES:
            for work in _works(*shape, block=block, precision=precision, memory=memory):
                product = TimedProduct(*work.amounts, watch.seconds(work.run))
                timed.setdefault(work.role, []).append(product)
            on_measured()
        rates += (
            SparseProductRate(block=block, role=role, **fit_terms(products)._asdict())
            for role, products in timed.items()
        )
    return tuple(rates)


class _Work(NamedTuple):
    """One product of a layer."""

    role: ProductRole
    run: Callable[[], object]
    amounts: tuple[float, float, float]
    """FLOP, bytes of what is packed, and of the result, as `SparseProductRate` counts them."""


def _works(
    tokens: int, outputs: int, inputs: int, share: int, *, block: int, precision: Precision,
    memory: ColdMemory,
) -> Iterator[_Work]:  # fmt: skip
    """The three products of a layer, with weights and saved inputs that come from memory."""
    part = BlockPart(rows=outputs // block, kept=inputs // block // share)
    dtype, itemsize = DTYPES[precision], PRECISION_BYTES[precision]
    layer = BlockSparseLinear(inputs, outputs, bias=True, block=block, parts=(part,)).to(dtype)
    values, blocks, bias = layer.values.detach(), layer.blocks, layer.bias
    x, gradient = (torch.randn(tokens, features).to(dtype) for features in (inputs, outputs))
    weights = (each.view(values.shape) for each in memory.tensors(1, values.numel()))
    saved = memory.tensors(tokens, inputs)
    ops, kept = torch.ops.windlass, values.numel()
    flop = 2.0 * tokens * kept
    yield _Work(
        "forward",
        lambda: ops.block_linear(x, next(weights), blocks, outputs, bias),
        (flop, itemsize * kept, itemsize * tokens * outputs),
    )
    yield _Work(
        "input_gradient",
        lambda: ops.block_linear_input_grad(gradient, next(weights), blocks, inputs),
        (flop, itemsize * kept, itemsize * tokens * inputs),
    )
    yield _Work(
        "weight_gradient",
        lambda: ops.block_linear_weight_grad(gradient, next(saved), blocks, block),
        (flop, itemsize * tokens * (inputs + outputs), itemsize * kept),
    )
