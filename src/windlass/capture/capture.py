"""Captures a chain of layers as a graph, without allocating a weight.

Each kind of layer runs forward and backward once at each of a few sizes, on tensors without
memory. Every count is then fitted as a polynomial of micro-batch and sequence, and checked at one
more size.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from windlass.capture.eager import eager_cost, looked_up_costs
from windlass.capture.fit import MICROS, fit
from windlass.capture.fuse import compiled_cost
from windlass.capture.record import Recording, record
from windlass.capture.trace import Fitted
from windlass.errors import ModelError
from windlass.models.chain import Chain
from windlass.models.structure import only_looks_up
from windlass.spec.graph import Graph, LayerCost, LayerKind, Parameter, Precision, Span

_DTYPES: dict[Precision, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_LONGEST = 64
"""Sequences of the trial runs stay below; longer ones tell nothing new."""
_SHORTEST = 9
_CHECK_MICRO = 5


def capture(chain: Chain) -> Graph:
    """The graph of a chain: ops, bytes and FLOP of each kind of layer, forward and backward.

    The last layer's costs include the mean cross-entropy of its logits, in float32.

    Raises:
        ModelError: a layer cannot run without numbers, takes only very short sequences, or does
            something whose cost is no polynomial of micro-batch and sequence.
    """
    kinds: dict[str, LayerKind] = {}
    widths: dict[str, tuple[int | None, int]] = {}
    width: int | None = None
    for index, (name, kind) in enumerate(zip(chain.names, chain.kinds, strict=True)):
        if kind not in kinds:
            kinds[kind], out = _kind(chain, index, width)
            widths[kind] = (width, out)
        taken, out = widths[kind]
        if taken != width:
            raise ModelError(
                f"layer `{name}` of model `{chain.name}` takes vectors of {width}, other layers "
                f"of its kind take {taken}; give every layer the same width"
            )
        width = out
    return Graph(
        name=chain.name,
        vocabulary=chain.vocabulary,
        max_sequence=chain.max_sequence,
        chain=tuple(_spans(chain.kinds)),
        kinds=kinds,
    )


def _kind(chain: Chain, index: int, width: int | None) -> tuple[LayerKind, int]:
    """One kind of layer, by its first layer, and the width of what that layer gives."""
    costs: list[LayerCost] = []
    out = 0
    looks_up = only_looks_up(chain.layers[index])
    for precision in _DTYPES:
        fitted, out = _fitted(chain, index, width, precision)
        costs += (
            looked_up_costs(fitted, precision)
            if looks_up
            else (eager_cost(fitted, precision), compiled_cost(fitted, precision))
        )
    kind = LayerKind(
        name=chain.kinds[index],
        parameters=tuple(_parameters(chain, index)),
        costs=tuple(costs),
        looks_up=looks_up,
    )
    return kind, out


def _parameters(chain: Chain, index: int) -> Iterator[Parameter]:
    for name, parameter in chain.layers[index].named_parameters(remove_duplicate=False):
        owner = chain.ties.get(f"{chain.names[index]}.{name}")
        yield Parameter(name=name, shape=tuple(parameter.shape), tied_to=owner)


def _fitted(
    chain: Chain, index: int, width: int | None, precision: Precision
) -> tuple[Fitted, int]:
    """The layer's trace with its numbers as polynomials, and the width of its output."""
    *fit_at, check_at = _sequences(chain)
    points = [(micro, sequence) for micro in MICROS for sequence in fit_at]
    check = (_CHECK_MICRO, check_at)
    at = {point: _run(chain, index, width, precision, point) for point in (*points, check)}
    first = at[points[0]]
    for point, recording in at.items():
        if recording.trace != first.trace:
            raise _not_one_polynomial(chain, index, point, "other operations")
    columns = {point: recording.numbers for point, recording in at.items()}
    numbers = tuple(
        fit({point: columns[point][place] for point in points}, fit_at)
        for place in range(len(first.numbers))
    )
    if any(q.at(*check) != seen for q, seen in zip(numbers, columns[check], strict=True)):
        raise _not_one_polynomial(chain, index, check, "another amount of work")
    return Fitted(trace=first.trace, numbers=numbers), first.output_shape[-1]


def _not_one_polynomial(
    chain: Chain, index: int, point: tuple[int, int], difference: str
) -> ModelError:
    return ModelError(
        f"layer `{chain.names[index]}` of model `{chain.name}` does {difference} at micro-batch "
        f"{point[0]}, sequence {point[1]} than its other sizes tell; its work must be a polynomial "
        "of both, at most linear in the micro-batch and quadratic in the sequence, so let its "
        "code not branch on sizes"
    )


def _run(
    chain: Chain, index: int, width: int | None, precision: Precision, point: tuple[int, int]
) -> Recording:
    layer = chain.layers[index]
    last = index == len(chain.layers) - 1
    try:
        return record(layer, _input(width, point), dtype=_DTYPES[precision], loss=last)
    except Exception as error:
        raise ModelError(
            f"layer `{chain.names[index]}` of model `{chain.name}` cannot run without numbers in "
            f"{precision} at micro-batch {point[0]}, sequence {point[1]}: "
            f"{type(error).__name__}: {' '.join(str(error).split())[:300]}; let its code not "
            "depend on the values of tensors, and hold constant tensors as buffers"
        ) from error


def _input(width: int | None, point: tuple[int, int]) -> Callable[[], Tensor]:
    """Makes tokens for the first layer, vectors for any other."""
    if width is None:
        return lambda: torch.zeros(point, dtype=torch.int64)
    return lambda: torch.empty(*point, width)


def _sequences(chain: Chain) -> tuple[int, int, int, int]:
    """Three lengths to fit at and one to check at, all shorter than the model's longest."""
    longest = _LONGEST if chain.max_sequence is None else min(_LONGEST, chain.max_sequence)
    if longest < _SHORTEST:
        raise ModelError(
            f"model `{chain.name}` takes sequences of at most {longest} tokens, must take "
            f"{_SHORTEST} to be measured"
        )
    # The full length would turn a slice of the position table into the table itself.
    check = longest - 1
    return check // 4, check // 2, 3 * check // 4, check


def _spans(kinds: tuple[str, ...]) -> Iterator[Span]:
    """Neighbours of one kind together."""
    start = 0
    for place in range(1, len(kinds) + 1):
        if place == len(kinds) or kinds[place] != kinds[start]:
            yield Span(kind=kinds[start], count=place - start)
            start = place
