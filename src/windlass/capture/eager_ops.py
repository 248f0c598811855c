"""Ops of a layer that runs as it is written: one op for each call."""

from collections.abc import Sequence

from windlass.capture.polynomial_fit import total
from windlass.capture.trace import Call, Fitted
from windlass.schema.graph import Exchange, LayerCost, MatmulShape, Op, Precision, Quantity


def eager_cost(fitted: Fitted, precision: Precision) -> LayerCost:
    """What the layer costs, run call by call."""
    trace, numbers = fitted.trace, fitted.numbers
    ops = tuple(
        Op(
            name=call.name,
            kind=call.kind,
            flop=numbers[call.flop],
            read_bytes=total(numbers[touch.nbytes] for touch in call.reads),
            written_bytes=total(numbers[touch.nbytes] for touch in call.writes),
            live_bytes=total([_live(fitted, place), set_in_order(call, numbers)]),
            shape=matrix_shape(call, numbers),
            exchange=slice_exchange(call, numbers),
        )
        for place, call in enumerate(trace.calls)
    )
    last = trace.forward_calls
    return LayerCost(
        precision=precision,
        compiled=False,
        forward=ops[:last],
        backward=ops[last:],
        kept_bytes=total(
            numbers[buffer.nbytes]
            for buffer in trace.buffers
            if buffer.role == "inner" and buffer.born < last and buffer.lives(last)
        ),
        input_bytes=numbers[trace.input_bytes],
        output_bytes=numbers[trace.output_bytes],
    )


def looked_up_costs(fitted: Fitted, precision: Precision) -> tuple[LayerCost, LayerCost]:
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


def matrix_shape(call: Call, numbers: Sequence[Quantity]) -> MatmulShape | None:
    """The shape of a matrix product; None of any other call."""
    return None if call.shape is None else MatmulShape(*(numbers[place] for place in call.shape))


def slice_exchange(call: Call, numbers: Sequence[Quantity]) -> Exchange | None:
    """What slices exchange; None of any other call."""
    if call.exchange is None:
        return None
    how, among, nbytes = call.exchange
    return Exchange(how, numbers[nbytes], among)


def set_in_order(call: Call, numbers: Sequence[Quantity]) -> Quantity:
    """Bytes that an exchange takes besides: parts lie by slice on their way, by sample elsewhere.

    A single sample lies so already, but is not told apart. What comes to be summed lies beside what
    goes.
    """
    if call.exchange is None or call.exchange[0] == "all_reduce":
        return Quantity()
    whole = numbers[call.exchange[2]]
    return whole.twice if call.exchange[0] == "reduce_scatter" else whole


def _live(fitted: Fitted, place: int) -> Quantity:
    forward = place < fitted.trace.forward_calls
    return total(
        fitted.numbers[buffer.nbytes]
        for buffer in fitted.trace.buffers
        if buffer.counts(forward=forward) and buffer.lives(place)
    )
