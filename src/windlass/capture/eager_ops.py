"""Ops of a layer that runs as it is written: one op for each call."""

from collections.abc import Sequence

from windlass.capture.polynomial_fit import sum_quantities
from windlass.capture.trace import TracedCall, FittedTrace
from windlass.schema.graph import Collective, LayerCost, MatmulShape, Op, Precision, Polynomial


def eager_cost(fitted: FittedTrace, precision: Precision) -> LayerCost:
    """What the layer costs, run call by call."""
    trace, numbers = fitted.trace, fitted.numbers
    ops = tuple(
        Op(
            name=call.name,
            kind=call.kind,
            flop=numbers[call.flop],
            read_bytes=sum_quantities(numbers[touch.nbytes] for touch in call.reads),
            written_bytes=sum_quantities(numbers[touch.nbytes] for touch in call.writes),
            live_bytes=sum_quantities([_live(fitted, place), layout_copy_bytes(call, numbers)]),
            shape=matmul_shape(call, numbers),
            collective=collective_of(call, numbers),
        )
        for place, call in enumerate(trace.calls)
    )
    last = trace.forward_calls
    return LayerCost(
        precision=precision,
        compiled=False,
        forward=ops[:last],
        backward=ops[last:],
        saved_bytes=sum_quantities(
            numbers[buffer.nbytes]
            for buffer in trace.buffers
            if buffer.role == "inner" and buffer.first_call < last and buffer.is_live(last)
        ),
        input_bytes=numbers[trace.input_bytes],
        output_bytes=numbers[trace.output_bytes],
    )


def embedding_costs(fitted: FittedTrace, precision: Precision) -> tuple[LayerCost, LayerCost]:
    """What a layer that only looks rows up costs, alike in both modes, for it is never compiled.

    A table's gradient comes as the rows that were asked for: they are put in order, and those of
    one row added. So as much is written as is read, whatever the size of the table.
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
    """The shape of a matrix product; None of any other call."""
    return None if call.matmul_sizes is None else MatmulShape(*(numbers[place] for place in call.matmul_sizes))


def collective_of(call: TracedCall, numbers: Sequence[Polynomial]) -> Collective | None:
    """What slices exchange; None of any other call."""
    if call.collective is None:
        return None
    how, among, nbytes = call.collective
    return Collective(how, numbers[nbytes], among)


def layout_copy_bytes(call: TracedCall, numbers: Sequence[Polynomial]) -> Polynomial:
    """Bytes that an exchange takes besides: parts lie by slice on their way, by sample elsewhere.

    A single sample lies so already, but is not told apart. What comes to be summed lies beside what
    goes.
    """
    if call.collective is None or call.collective[0] == "all_reduce":
        return Polynomial()
    whole = numbers[call.collective[2]]
    return whole.doubled if call.collective[0] == "reduce_scatter" else whole


def _live(fitted: FittedTrace, place: int) -> Polynomial:
    forward = place < fitted.trace.forward_calls
    return sum_quantities(
        fitted.numbers[buffer.nbytes]
        for buffer in fitted.trace.buffers
        if buffer.is_charged(forward=forward) and buffer.is_live(place)
    )
