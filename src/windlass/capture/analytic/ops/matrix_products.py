"""Products of matrices: linear layers and batches."""

from collections.abc import Sequence

from windlass.capture.analytic.autograd import attach, kept_outputs, new_node, only
from windlass.capture.analytic.ops.views import flatten, reshape, transpose
from windlass.capture.analytic.tensor import Gradients, Needs, Tensor

_Saved = Sequence[Tensor]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x W^T + b` of `x[b s n]`."""
    rows = flatten(x, 0, 1)
    factor = transpose(weight, 0, 1)
    product = _mm(rows, factor) if bias is None else _addmm(bias, rows, factor)
    return reshape(product, (*x.shape[:-1], weight.shape[0]))


def _mm(left: Tensor, right: Tensor) -> Tensor:
    save = [*([left] if right.node else ()), *([right] if left.node else ())]
    node = new_node((left, right), _mm_backward, save)
    return attach(node, kept_outputs(left, lambda: (_product("mm", left, right),))[0])


def _mm_backward(gradients: Gradients, saved: _Saved, needs: Needs) -> list[Tensor | None]:
    gradient = only(gradients)
    by_right = _by_right(gradient, saved[0]) if needs[1] else None
    by_left = _product("mm", gradient, transpose(saved[-1], 0, 1)) if needs[0] else None
    return [by_left, by_right]


def _by_right(gradient: Tensor, left: Tensor) -> Tensor:
    """The gradient of a right factor that is transposed in memory."""
    return transpose(_product("mm", transpose(gradient, 0, 1), left), 0, 1)


def _addmm(bias: Tensor, left: Tensor, right: Tensor) -> Tensor:
    save = [*([left] if right.node else ()), *([right] if left.node else ())]
    node = new_node((bias, left, right), _addmm_backward, save)
    return attach(node, kept_outputs(left, lambda: (_product("addmm", left, right, bias),))[0])


def _addmm_backward(gradients: Gradients, saved: _Saved, needs: Needs) -> list[Tensor | None]:
    gradient = only(gradients)
    by_left = _product("mm", gradient, transpose(saved[-1], 0, 1)) if needs[1] else None
    by_right = _by_right(gradient, saved[0]) if needs[2] else None
    return [gradient, by_left, by_right]


def bmm(left: Tensor, right: Tensor) -> Tensor:
    """Products of batches of matrices."""
    node = new_node((left, right), _bmm_backward, [left, right])
    return attach(node, _batch_product(left, right))


def _bmm_backward(gradients: Gradients, saved: _Saved, _: Needs) -> list[Tensor]:
    (left, right), gradient = saved, only(gradients)
    by_right = _batch_product(transpose(left, 1, 2), gradient)
    return [_batch_product(gradient, transpose(right, 1, 2)), by_right]


def _batch_product(left: Tensor, right: Tensor) -> Tensor:
    (batch, m, k), n = left.shape, right.shape[2]
    out = Tensor(left.tape, (batch, m, n), left.dtype)
    left.tape.call(
        "bmm", [left, right], [out], kind="matmul", flop=2 * batch * m * n * k,
        matmul_sizes=(batch, m, n, k),
    )  # fmt: skip
    return out


def _product(name: str, left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    (m, k), n = left.shape, right.shape[1]
    out = Tensor(left.tape, (m, n), left.dtype)
    reads = [left, right] if bias is None else [bias, left, right]
    sizes = (1, m, n, k)
    left.tape.call(name, reads, [out], kind="matmul", flop=2 * m * n * k, matmul_sizes=sizes)
    return out
