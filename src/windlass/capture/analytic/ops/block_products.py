"""Products with weights of which only some blocks are kept."""

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import NamedTuple

from windlass.capture.analytic.autograd import attach, kept_outputs, new_node, only
from windlass.capture.analytic.ops.reductions import sum_to
from windlass.capture.analytic.tensor import DTYPE_BYTES, Gradients, Needs, Tensor
from windlass.sparsity import SECTION_ACTIVATION, SectionSizes

_Saved = Sequence[Tensor]


class KeptBlocks(NamedTuple):
    """A weight of kept blocks with its bias."""

    values: Tensor
    blocks: Tensor
    bias: Tensor | None


def block_linear(
    x: Tensor, values: Tensor, blocks: Tensor, outputs: int, bias: Tensor | None
) -> Tensor:
    """`x W^T + b` of `x[b s n]` and a weight of kept blocks."""
    node = new_node((x, values, *([bias] if bias else ())), _block_linear_backward)
    (out,) = kept_outputs(x, lambda: (_block_linear(x, values, blocks, outputs, bias),))
    if node is not None:
        node.save([x, values, blocks], x.tape)
    return attach(node, out)


def _block_linear(
    x: Tensor, values: Tensor, blocks: Tensor, outputs: int, bias: Tensor | None
) -> Tensor:
    *_, inputs = x.shape
    out = Tensor(x.tape, (*x.shape[:-1], outputs), x.dtype)
    reads = [x, values, blocks, *([bias] if bias else ())]
    _sparse_product("block_linear", reads, out, values, (outputs, inputs))
    return out


def _block_linear_backward(gradients: Gradients, saved: _Saved, needs: Needs) -> list[Tensor]:
    gradient = only(gradients)
    x, values, blocks = saved
    *shape, outputs = gradient.shape
    inputs = x.shape[-1]
    by_x = Tensor(x.tape, (*shape, inputs), x.dtype)
    reads = [gradient, values, blocks]
    _sparse_product("block_linear_input_grad", reads, by_x, values, (inputs, outputs))
    by_values = Tensor(values.tape, values.shape, values.dtype)
    reads = [gradient, x, blocks]
    _sparse_product("block_linear_weight_grad", reads, by_values, values, (outputs, inputs))
    if len(needs) == 2:
        return [by_x, by_values]
    return [by_x, by_values, sum_to(gradient, (outputs,))]


def _sparse_product(
    name: str, reads: Sequence[Tensor], out: Tensor, values: Tensor, sides: tuple[int, int]
) -> None:
    """Records a product of tokens with kept blocks, whose dense weight has some sides."""
    tokens, kept = prod(reads[0].shape[:-1]), prod(values.shape)
    wide, deep = sides
    is_weight = name.endswith("weight_grad")
    sizes = (1, wide, deep, tokens) if is_weight else (1, tokens, wide, deep)
    out.tape.call(
        name, reads, [out], kind="matmul", flop=2 * tokens * kept, matmul_sizes=sizes,
        kept=(values.shape[-1], kept),
    )  # fmt: skip


def block_feed_forward(x: Tensor, up: "KeptBlocks", down: "KeptBlocks", inner: int) -> Tensor:
    """`down(gelu(up(x)))` of `x[b s d]` and two weights of kept blocks, as a section."""
    biases = [weight.bias for weight in (up, down) if weight.bias is not None]
    has_biases = up.bias is not None, down.bias is not None
    node = new_node(
        (x, up.values, down.values, *biases), partial(_section_backward, inner, has_biases)
    )
    y, hidden = kept_outputs(x, lambda: _section(x, up, down, inner))
    if node is not None:
        node.save([x, hidden, up.values, up.blocks, down.values, down.blocks], x.tape)
    return attach(node, y)


def _section(x: Tensor, up: "KeptBlocks", down: "KeptBlocks", inner: int) -> tuple[Tensor, Tensor]:
    tokens = prod(x.shape[:-1])
    y, hidden = Tensor(x.tape, x.shape, x.dtype), Tensor(x.tape, (tokens * inner,), x.dtype)
    reads = [x, *(tensor for weight in (up, down) for tensor in weight if tensor is not None)]
    _record_section(_section_sizes(x, up.values, down.values, inner), reads, [y, hidden])
    return y, hidden


def _section_backward(
    inner: int, has_biases: tuple[bool, bool], gradients: Gradients, saved: _Saved, _: Needs
) -> list[Tensor]:
    gradient = only(gradients)
    x, hidden, up, up_blocks, down, down_blocks = saved
    outputs = [
        Tensor(x.tape, shape, x.dtype) for shape in (x.shape, up.shape, down.shape, (inner,))
    ]
    reads = [gradient, x, hidden, up, up_blocks, down, down_blocks]
    _record_section(_section_sizes(x, up, down, inner, backward=True), reads, outputs)
    by_x, by_up, by_down, by_bias = outputs
    found = [by_x, by_up, by_down]
    if has_biases[0]:
        found.append(by_bias)
    if has_biases[1]:
        found.append(sum_to(gradient, (x.shape[-1],)))
    return found


def _section_sizes(
    x: Tensor, up: Tensor, down: Tensor, inner: int, *, backward: bool = False
) -> SectionSizes:
    *tokens, width = x.shape
    return SectionSizes(
        prod(tokens), width, inner, prod(up.shape), prod(down.shape), up.shape[-1],
        DTYPE_BYTES[x.dtype], backward,
    )  # fmt: skip


def _record_section(sizes: SectionSizes, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
    tape = writes[0].tape
    scratch = Tensor(tape, (sizes.scratch_bytes,), "bool")
    for tensor in writes:
        _ = tensor.buffer  # results are there from the beginning
    tape.call(SECTION_ACTIVATION, [], [(scratch, sizes.moved_bytes)])
    for product in sizes.products:
        tape.call(
            product.name, [*reads, (scratch, 0)], writes, kind="matmul", flop=product.flop,
            matmul_sizes=product.sizes, kept=(sizes.block, product.kept),
        )  # fmt: skip
