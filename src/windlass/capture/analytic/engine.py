"""Reverse-mode differentiation in the order of PyTorch's engine, which decides what is freed when.

A node whose gradients are complete runs; of several, the one that was created last. Gradients that
a node is given are freed after it ran, and so is what it saved. Source: torch/csrc/autograd
(engine.cpp, `evaluate_function` and `validate_outputs`; input_buffer.cpp).
"""

from collections.abc import Sequence
from heapq import heappop, heappush

from windlass.capture.analytic.autograd import only
from windlass.capture.analytic.ops.elementwise import add, cast
from windlass.capture.analytic.ops.reductions import sum_to
from windlass.capture.analytic.tensor import Gradients, Node, Tensor


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
