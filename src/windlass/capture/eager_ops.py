"""Ops of a layer that runs eagerly: one op for each recorded call."""

from collections.abc import Sequence
from math import prod

from windlass.capture.trace import FittedTrace, TracedCall, sum_polynomials
from windlass.schema import (
    Collective,
    KeptBlocks,
    LayerCost,
    MatmulShape,
    Op,
    Polynomial,
    Precision,
)


def eager_cost(fitted: FittedTrace, precision: Precision) -> LayerCost:
    """Cost of a layer that runs call by call."""
    trace, numbers = fitted.trace, fitted.numbers
    live_bytes = _live_bytes(fitted)
    ops = tuple(
        Op(
            name=call.name,
            kind=call.kind,
            flop=numbers[call.flop],
            read_bytes=sum_polynomials(numbers[access.nbytes] for access in call.reads),
            written_bytes=sum_polynomials(numbers[access.nbytes] for access in call.writes),
            live_bytes=sum_polynomials([live_bytes[index], layout_copy_bytes(call, numbers)]),
            shape=matmul_shape(call, numbers),
            kept=kept_blocks(call, numbers),
            collective=collective_of(call, numbers),
            is_causal=call.is_causal,
        )
        for index, call in enumerate(trace.calls)
    )
    split = trace.forward_calls
    return LayerCost(
        precision=precision,
        compiled=False,
        forward=ops[:split],
        backward=ops[split:],
        saved_bytes=sum_polynomials(
            numbers[buffer.nbytes]
            for buffer in trace.buffers
            if buffer.role == "internal" and buffer.first_call < split and buffer.is_live(split)
        ),
        input_bytes=numbers[trace.input_bytes],
        output_bytes=numbers[trace.output_bytes],
    )


def embedding_costs(fitted: FittedTrace, precision: Precision) -> tuple[LayerCost, LayerCost]:
    """Eager and compiled cost of an embedding-only layer, the same since it is never compiled.

    The gradient of a table is sparse: the rows that were looked up are sorted, and equal rows
    added. So it writes as much as it reads, whatever the size of the table.
    """
    cost = eager_cost(fitted, precision)
    backward = tuple(
        op.model_copy(
            update={
                "name": "_coalesce",
                "written_bytes": op.read_bytes,
                "live_bytes": op.read_bytes,
            }
        )
        if op.name == "embedding_dense_backward"
        else op
        for op in cost.backward
    )
    eager = cost.model_copy(update={"backward": backward})
    return eager, eager.model_copy(update={"compiled": True})


def matmul_shape(call: TracedCall, numbers: Sequence[Polynomial]) -> MatmulShape | None:
    """The shape of a matrix product; None for any other call."""
    if call.matmul_sizes is None:
        return None
    return MatmulShape(*(numbers[index] for index in call.matmul_sizes))


def kept_blocks(call: TracedCall, numbers: Sequence[Polynomial]) -> KeptBlocks | None:
    """What is kept of a sparse weight; None for any other call."""
    if call.kept is None or call.matmul_sizes is None:
        return None
    block, kept = call.kept
    _, *sides = (numbers[index] for index in call.matmul_sizes)
    dense = prod(side.constant for side in sides if side.constant)
    return KeptBlocks(block, kept / dense)


def collective_of(call: TracedCall, numbers: Sequence[Polynomial]) -> Collective | None:
    """The collective that a call is; None for any other call."""
    if call.collective is None:
        return None
    kind, axis, nbytes = call.collective
    return Collective(kind, numbers[nbytes], axis)


def layout_copy_bytes(call: TracedCall, numbers: Sequence[Polynomial]) -> Polynomial:
    """Bytes of the copies in another layout that a call makes and frees inside.

    A collective orders data by rank; elsewhere it is by sample. A single sample needs no such copy,
    but is not distinguished. A reduce-scatter also holds what it receives beside what it sends.
    """
    if call.kept is not None:
        return _packed_bytes(call, numbers)
    if call.collective is None or call.collective[0] == "all_reduce":
        return Polynomial()
    full = numbers[call.collective[2]]
    return full.doubled if call.collective[0] == "reduce_scatter" else full


def _packed_bytes(call: TracedCall, numbers: Sequence[Polynomial]) -> Polynomial:
    """Bytes that a sparse product packs before it multiplies, as `sparsity/block_linear.cpp` does.

    These are the kept blocks, whose rows float32 gradients of inputs take as they are, or the
    narrower factor of their gradient.
    """
    first, second = (numbers[access.nbytes] for access in call.reads[:2])
    if second != Polynomial(second.constant):
        return min(first, second)
    _, kept = call.kept or (0, 0)
    in_place = call.name == "block_linear_input_grad" and second.constant == 4 * kept
    return Polynomial() if in_place else second


def _live_bytes(fitted: FittedTrace) -> list[Polynomial]:
    """Bytes of the pass that are allocated while each call runs."""
    trace, calls = fitted.trace, len(fitted.trace.calls)
    live: list[list[Polynomial]] = [[] for _ in range(calls)]
    for buffer in trace.buffers:
        end = calls if buffer.freed_at is None else buffer.freed_at
        nbytes = fitted.numbers[buffer.nbytes]
        passes = ((True, 0, trace.forward_calls), (False, trace.forward_calls, calls))
        for forward, first, last in passes:
            if buffer.is_charged(forward=forward):
                for call in live[max(first, buffer.first_call) : min(last, end)]:
                    call.append(nbytes)
    return [sum_polynomials(nbytes) for nbytes in live]
