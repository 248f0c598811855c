"""The loss, by itself or fused with the projection to the vocabulary."""

from collections.abc import Sequence
from math import prod

from windlass.capture.analytic.autograd import attach, new_node, only
from windlass.capture.analytic.tensor import DTYPE_BYTES, Gradients, Needs, Tensor
from windlass.capture.trace import FUSED_SOFTMAX
from windlass.models import FusedLossSizes

_Saved = Sequence[Tensor]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of `[n v]` in float32."""
    return _nll_loss(_log_softmax(logits), targets)


def _log_softmax(x: Tensor) -> Tensor:
    node = new_node((x,), _log_softmax_backward)
    out = Tensor(x.tape, x.shape, x.dtype)
    x.tape.call("_log_softmax", [x], [out])
    if node is not None:
        node.save([out], x.tape)
    return attach(node, out)


def _log_softmax_backward(gradients: Gradients, saved: _Saved, _: Needs) -> list[Tensor]:
    (result,) = saved
    out = Tensor(result.tape, result.shape, result.dtype)
    result.tape.call("_log_softmax_backward_data", [only(gradients), result], [out])
    return [out]


def _nll_loss(x: Tensor, targets: Tensor) -> Tensor:
    node = new_node((x,), _nll_loss_backward, [x, targets])
    loss, total = (Tensor(x.tape, (), x.dtype) for _ in range(2))
    picked = prod(targets.shape) * DTYPE_BYTES[x.dtype]
    x.tape.call("nll_loss_forward", [(x, picked), targets], [loss, total])
    if node is not None:
        node.save([total], x.tape)
    return attach(node, loss)


def _nll_loss_backward(gradients: Gradients, saved: _Saved, _: Needs) -> list[Tensor]:
    x, targets, total = saved
    out = Tensor(x.tape, x.shape, x.dtype)
    x.tape.call("nll_loss_backward", [only(gradients), targets, total], [out])
    return [out]


def fused_cross_entropy(x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    """Mean cross-entropy of `x W^T + b` of `x[n d]`, whose logits never exist whole."""
    inputs = [x, weight] if bias is None else [x, weight, bias]
    node = new_node(inputs, _fused_backward)
    tape, (rows, width), vocabulary = x.tape, x.shape, weight.shape[0]
    sizes = FusedLossSizes(vocabulary, width, DTYPE_BYTES[x.dtype])
    scratch = Tensor(tape, (sizes.scratch_bytes,), "bool")
    tape.call(FUSED_SOFTMAX, [], [(scratch, rows * sizes.moved_bytes)])
    loss, scale = (Tensor(tape, (), "float32") for _ in range(2))
    by_bias = (0,) if bias is None else bias.shape
    gradients = [Tensor(tape, shape, x.dtype) for shape in (x.shape, weight.shape, by_bias)]
    tape.call(
        "linear_cross_entropy_grads", [*inputs, targets, (scratch, 0)], [loss, *gradients, scale],
        kind="matmul", flop=6 * rows * vocabulary * width,
        matmul_sizes=(3, rows, vocabulary, width),
    )  # fmt: skip
    if node is not None:
        node.save([*gradients, scale], tape)
    return attach(node, loss)


def _fused_backward(gradients: Gradients, saved: _Saved, needs: Needs) -> list[Tensor | None]:
    by_x, by_weight, by_bias, scale = saved
    factor = _scaled(only(gradients), scale)
    # The bias comes first, as in the operator's own derivative.
    of_bias = [_scaled(by_bias, factor)] if len(needs) > 2 else []
    return [_scaled(by_x, factor), _scaled(by_weight, factor), *of_bias]


def _scaled(x: Tensor, factor: Tensor) -> Tensor:
    """`x * factor`, without a node."""
    out = Tensor(x.tape, x.shape, x.dtype)
    x.tape.call("mul", [x, factor], [out])
    return out
