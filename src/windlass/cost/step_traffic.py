"""Bytes that a step moves beside its layers' operations: batches, and sums of gradients."""

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from windlass.program import micro_of_rank
from windlass.schema import (
    OWN_STACK,
    Device,
    Graph,
    LayerKind,
    Plan,
    Stack,
)

_ByteCount = TypeVar("_ByteCount", float, npt.NDArray[np.float64])

_SUM_BYTES = 4
"""Gradients are summed in float32."""


_LOAD_PASSES = 3
"""Passes of a layer that take the host as long as drawing a micro-batch."""


def batch_load_bytes(graph: Graph, plan: Plan) -> float:
    """Bytes copied, read and written, to load the inputs and targets of a micro-batch."""
    each = graph.example_bytes(plan.batch.sequence, plan.parameter_itemsize)
    return 2 * micro_of_rank(plan) * each


def batch_load_host_seconds(device: Device) -> float:
    """Host time to draw a micro-batch's sequences, which nothing hides on a CPU.

    It is interpreted code, as a pass is; on 2 cores of an AMD EPYC it takes as long as 3 passes.
    """
    return (_LOAD_PASSES if device.kind == "cpu" else 1) * device.pass_seconds


def copy_seconds(nbytes: float, device: Device) -> float:
    """Seconds of one operation that moves this many bytes."""
    return nbytes / device.traffic.at(nbytes)


def tied_grad_add_bytes(elements: _ByteCount, gradient_bytes: int) -> _ByteCount:
    """Bytes moved to add a tied weight's gradient from another stage: two reads and a write."""
    return 3 * elements * gradient_bytes


def grad_accumulation_bytes(
    kind: LayerKind, plan: Plan, stack: Stack | None, *, shared: int, rows: int, first: bool
) -> tuple[int, ...]:
    """Bytes moved by each operation that accumulates a layer's new gradients.

    The first micro-batch's gradients become the accumulated ones without a copy, except for weights
    that already have some; in bfloat16 with accumulation they are converted to float32. An
    embedding's rows are added to its gradient, which is created as zeros by the first micro-batch.

    Args:
        plan: states the bytes of an element of a new and of an accumulated gradient.
        stack: software that sums them; None means Windlass's own runtime.
        shared: elements whose gradient another layer of the stage has already created.
        rows: gradient elements that one pass of an embedding gives.
        first: whether these are the first micro-batch's gradients.
    """
    weight_bytes, gradient_bytes = plan.parameter_itemsize, plan.gradient_itemsize
    sums = (stack or OWN_STACK).gradient_sums
    if sums != "separate":
        gradient_bytes = weight_bytes
    if sums == "fused" and not kind.is_embedding:
        return (0,)
    element_bytes = weight_bytes + 2 * gradient_bytes
    counts = [parameter.count for parameter in kind.parameters if not parameter.frozen]
    if kind.is_embedding:
        created = (kind.trained_count - shared) * gradient_bytes if first else 0
        return rows * element_bytes, created
    if not first:
        return (sum(counts) * element_bytes,)
    converted = counts if gradient_bytes != weight_bytes else []
    return shared * element_bytes, *(count * (weight_bytes + _SUM_BYTES) for count in converted)
