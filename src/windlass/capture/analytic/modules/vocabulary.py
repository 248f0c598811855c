"""A rank's rows of the vocabulary: token table, logits, and their loss."""

from collections.abc import Sequence
from functools import partial
from math import prod

from windlass.capture.analytic.autograd import attach, new_node, only
from windlass.capture.analytic.ops.collectives import (
    Rank,
    all_gather,
    all_reduce,
    all_reduce_identity_grad,
    all_reduce_max,
)
from windlass.capture.analytic.ops.elementwise import (
    bitwise_not,
    bitwise_or,
    cast,
    compare,
    div,
    exp,
    log,
    masked_fill,
    sub,
    unary,
)
from windlass.capture.analytic.ops.matrix_products import linear
from windlass.capture.analytic.ops.reductions import amax_last, sum_all, sum_last
from windlass.capture.analytic.ops.views import flatten, select, squeeze, stack, unsqueeze
from windlass.capture.analytic.scope import Scope
from windlass.capture.analytic.strides import Shape
from windlass.capture.analytic.tensor import DTYPE_BYTES, Gradients, Needs, Tensor
from windlass.capture.trace import FUSED_SOFTMAX
from windlass.models import FusedLossSizes, ShardingRule


class Vocabulary:
    """A rank's rows of the token table: takes all tokens, gives all vectors."""

    def __init__(self, scope: Scope) -> None:
        self.rank = scope.rank
        self.weight = vocabulary_weight(scope, None)

    def __call__(self, tokens: Tensor) -> Tensor:
        """`Int[b s]` to `[b s d]`."""
        if self.rank.degree == 1:
            return embedding(self.weight, tokens)
        rows = unary("sub", tokens)
        elsewhere = bitwise_or(compare("lt", rows), compare("ge", rows))
        vectors = embedding(self.weight, masked_fill(rows, elsewhere))
        return all_reduce(masked_fill(vectors, unsqueeze(elsewhere, 2)), self.rank.all_group)


def vocabulary_weight(scope: Scope, tied_to: str | None) -> Tensor:
    """The first rank's rows of a table of the vocabulary."""
    vocabulary, degree = scope.config.vocabulary, scope.rank.degree
    scope.share(ShardingRule(style="vocabulary"), vocabulary, degree)
    rows = -(-vocabulary // degree)
    return scope.parameter(
        "weight", (rows, scope.config.width), sharded=0, replicated_over=None, tied_to=tied_to
    )


class Logits:
    """A rank's columns of the logits: takes the rank's tokens, gives logits of all tokens."""

    def __init__(self, scope: Scope) -> None:
        config = scope.config
        self.rank = scope.rank
        owner = "embedding.tokens.weight" if config.tied_embeddings else None
        self.weight = vocabulary_weight(scope, owner)
        rows = (self.weight.shape[0],)
        self.bias = None
        if config.head_bias:
            self.bias = scope.parameter("bias", rows, sharded=0, replicated_over=None)

    def __call__(self, x: Tensor) -> Tensor:
        """`[b s/r d/c]` to `[b s v/t]`."""
        return linear(all_gather(x, self.rank.all_group), self.weight, self.bias)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """The loss of `x[b s d]`, fused with the projection; for a single rank."""
        rows, flat = flatten(x, 0, 1), flatten(targets, 0, 1)
        return fused_cross_entropy(rows, self.weight, self.bias, flat)


def mean_cross_entropy(logits: Tensor, targets: Tensor, rank: Rank) -> Tensor:
    """Mean cross-entropy of logits, sharded or not, in float32."""
    if rank.degree == 1:
        wide = flatten(cast(logits, "float32"), 0, 1)
        return cross_entropy(wide, flatten(targets, 0, 1))
    counts = compare("ne", targets)
    losses = _token_losses(cast(logits, "float32"), targets, rank)
    return div(sum_all(masked_fill(losses, bitwise_not(counts))), sum_all(counts))


def _token_losses(logits: Tensor, targets: Tensor, rank: Rank) -> Tensor:
    group = rank.all_group
    largest = all_reduce_max(amax_last(logits.detach()), group)
    shifted = sub(logits, unsqueeze(largest, 2))
    column = unary("sub", targets)
    elsewhere = bitwise_or(compare("lt", column), compare("ge", column))
    index = unsqueeze(masked_fill(column, elsewhere), 2)
    target_logits = masked_fill(squeeze(gather_last(shifted, index), 2), elsewhere)
    sums = all_reduce_identity_grad(stack((sum_last(exp(shifted)), target_logits), 0), group)
    return sub(log(select(sums, 0, 0)), select(sums, 0, 1))


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


_SavedIndices = Sequence[Tensor]


def embedding(table: Tensor, index: Tensor) -> Tensor:
    """The rows of a table that an index picks."""
    node = new_node((table,), partial(_embedding_backward, table.shape), [index])
    out = Tensor(table.tape, (*index.shape, table.shape[1]), table.dtype)
    table.tape.call("embedding", [(table, out.touched_bytes), index], [out])
    return attach(node, out)


def _embedding_backward(
    shape: Shape, gradients: Gradients, saved: _SavedIndices, _: Needs
) -> list[Tensor]:
    gradient = only(gradients)
    table = Tensor(gradient.tape, shape, gradient.dtype)
    gradient.tape.call("embedding_dense_backward", [gradient, saved[0]], [table])
    return [table]


def gather_last(x: Tensor, index: Tensor) -> Tensor:
    """The elements of the last dimension that an index picks."""
    node = new_node((x,), _gather_backward, [x, index])
    out = Tensor(x.tape, index.shape, x.dtype)
    x.tape.call("gather", [(x, out.touched_bytes), index], [out])
    return attach(node, out)


def _gather_backward(gradients: Gradients, saved: _SavedIndices, _: Needs) -> list[Tensor]:
    (x, index), gradient = saved, only(gradients)
    full = Tensor(gradient.tape, x.shape, gradient.dtype)
    gradient.tape.call("new_zeros", [gradient], [full])
    gradient.tape.call("scatter_add", [full, index, gradient], [full])
    return [full]
