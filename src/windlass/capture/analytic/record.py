"""Runs a layer forward and backward on symbolic sizes and gives its trace.

A size of a transformer is a polynomial of micro-batch B and sequence S whose coefficients are small
whole numbers. With S = 2^96 and B = 2^288 these are the digits of the number in base 2^96, so that
plain integers compute with polynomials (Kronecker substitution).

A node whose gradients are complete runs; of several, the one that was created last. Gradients that
a node is given are freed after it ran, and so is what it saved. Source: torch/csrc/autograd
(engine.cpp, `evaluate_function` and `validate_outputs`; input_buffer.cpp).
"""

from collections.abc import Sequence
from heapq import heappop, heappush

from windlass.capture.analytic.autograd import Checkpoint, leaf, only
from windlass.capture.analytic.modules.transformer import BertHead, Head, LayerType
from windlass.capture.analytic.modules.vocabulary import mean_cross_entropy
from windlass.capture.analytic.ops.collectives import Rank
from windlass.capture.analytic.ops.elementwise import add, cast
from windlass.capture.analytic.ops.reductions import sum_to
from windlass.capture.analytic.scope import Scope
from windlass.capture.analytic.tensor import Gradients, Node, Tape, Tensor
from windlass.capture.trace import FittedTrace
from windlass.schema import Polynomial, Precision

_DIGIT_BITS = 96
_MASK = (1 << _DIGIT_BITS) - 1

_SEQUENCE = 1 << _DIGIT_BITS
"""The symbol S."""
_MICRO_BATCH = _SEQUENCE**3
"""The symbol B."""


def layer_scope(layer: LayerType, rank: Rank, precision: Precision) -> Scope:
    """A scope for the modules of one layer.

    Args:
        rank: the first tensor-parallel rank.
    """
    return Scope(
        tape=Tape(),
        config=layer.config,
        rank=rank,
        dtype="bfloat16" if precision == "bfloat16" else "float32",
        parameters=[],
        rules=[],
        feature_paths=[],
    )


def record_layer(
    layer: LayerType,
    rank: Rank,
    precision: Precision,
    *,
    selective: bool = False,
    fused: bool = False,
) -> FittedTrace:
    """The trace of a layer's forward and backward pass.

    Args:
        rank: the first tensor-parallel rank.
        selective: whether it runs with selective activation checkpointing.
        fused: whether the last layer's loss is fused with its projection.
    """
    scope, config = layer_scope(layer, rank, precision), layer.config
    run, tape = layer.build(scope), scope.tape
    trace, weights = tape.trace, [tensor for _, tensor in scope.parameters]
    tokens = (_MICRO_BATCH, _SEQUENCE * rank.rows)
    if layer.place == "first":
        x = Tensor(tape, tokens, "int64")
    else:
        x = leaf(Tensor(tape, (_MICRO_BATCH, _SEQUENCE, config.width // rank.columns), scope.dtype))
    targets = [Tensor(tape, tokens, "int64")] if layer.place == "last" else []
    state = (*weights, *scope.buffers)
    trace.set_role([tensor.buffer for tensor in state], "parameter")
    trace.set_role([tensor.buffer for tensor in (x, *targets)], "input")
    if fused and isinstance(run, Head | BertHead):
        y = run.loss(x, *targets)
    else:
        y = Checkpoint(tape, lambda: run(x)).forward() if selective else run(x)
        for target in targets:
            y = mean_cross_entropy(y, target, rank)
    trace.end_forward([y.buffer])
    tape.records_gradients = False
    output_gradient = Tensor(tape, y.shape, y.dtype)
    trace.set_role([output_gradient.buffer], "output_gradient")
    inputs = [x] if x.node else []
    found = gradients(y, output_gradient, [*inputs, *weights])
    of_weights = found[len(inputs) :]
    trace.set_role([gradient.buffer for gradient in of_weights], "parameter_gradient")
    finished = trace.finish(input_bytes=x.touched_bytes, output_bytes=y.touched_bytes)
    # Most sizes occur many times.
    polynomials: dict[int, Polynomial] = {}
    for number in trace.numbers:
        if number not in polynomials:
            polynomials[number] = _polynomial(number, rank.rows)
    return FittedTrace(trace=finished, numbers=tuple(map(polynomials.__getitem__, trace.numbers)))


def _polynomial(number: int, rows: int) -> Polynomial:
    """The polynomial that a number stands for.

    Args:
        number: computed from `_MICRO_BATCH` and `_SEQUENCE`.
        rows: the number of tokens that `_SEQUENCE` stood for was S / rows.
    """
    digits = [number >> place * _DIGIT_BITS & _MASK for place in range(6)]
    return Polynomial(
        *(digit / rows**power for digit, power in zip(digits, (0, 1, 2, 0, 1, 2), strict=True))
    )


def gradients(output: Tensor, output_gradient: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of some leaves, all of which the output depends on."""
    root = output.node
    if root is None:
        return []
    wanted = {id(tensor.node): index for index, tensor in enumerate(leaves)}
    found: dict[int, Tensor] = {}
    waiting = _dependencies(root)
    buffers: dict[int, Gradients] = {id(root): [output_gradient]}
    ready: list[tuple[int, int, Node]] = [(-root.sequence, 0, root)]
    while ready:
        _, _, node = heappop(ready)
        given = buffers.pop(id(node))
        if node.backward is None:
            found[wanted[id(node)]] = only(given)
            continue
        results = _run(node, given)
        del given
        for index, edge in enumerate(node.edges):
            if edge is None:
                continue
            gradient, results[index] = results[index], None
            target, key = edge.node, id(edge.node)
            slots = buffers.setdefault(key, [None] * target.outputs)
            old, slots[edge.output] = slots[edge.output], None
            if old is not None and gradient is not None:
                gradient = add(old, gradient)
            slots[edge.output] = gradient
            del old, gradient, slots
            waiting[key] -= 1
            if not waiting[key]:
                heappush(ready, (-target.sequence, key, target))
    return [found[index] for index in range(len(leaves))]


def _run(node: Node, given: Gradients) -> Gradients:
    """The gradients of a node's inputs, in their shapes and data types."""
    results = _apply(node, given)
    for index, edge in enumerate(node.edges):
        gradient, results[index] = results[index], None
        if edge is not None and gradient is not None:
            gradient = sum_to(gradient, edge.shape)
            gradient = cast(gradient, edge.dtype)
            results[index] = gradient
        del gradient
    node.saved = []
    return results


def _apply(node: Node, given: Gradients) -> Gradients:
    if node.backward is None:
        raise RuntimeError("a leaf has no backward")
    saved = [item.take() if not isinstance(item, Tensor) else item for item in node.saved]
    needs = tuple(edge is not None for edge in node.edges)
    return list(node.backward(given, saved, needs))


def _dependencies(root: Node) -> dict[int, int]:
    """By node, how many gradients it waits for."""
    counts: dict[int, int] = {id(root): 0}
    pending = [root]
    while pending:
        for edge in pending.pop().edges:
            if edge is not None:
                if id(edge.node) not in counts:
                    counts[id(edge.node)] = 0
                    pending.append(edge.node)
                counts[id(edge.node)] += 1
    return counts
