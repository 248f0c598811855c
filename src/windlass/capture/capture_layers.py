"""Captures a chain of layers as a graph, without allocating a weight.

Each kind of layer runs forward and backward once at each of a few sizes, on tensors without
memory. Every count is then fitted as a polynomial of micro-batch and sequence, and checked at one
more size. For a cut over t slices the first slice's twin of each layer runs instead: what is fused
and kept does not follow from other degrees, nor does an uneven vocabulary.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from windlass.capture.eager_ops import eager_cost, embedding_costs
from windlass.capture.fused_ops import compiled_cost
from windlass.capture.polynomial_fit import FIT_MICROBATCHES, fit_polynomial
from windlass.capture.recorder import RecordedPass, record_layer
from windlass.capture.trace import FittedTrace
from windlass.errors import ModelError
from windlass.models.layer_kinds import is_embedding_only
from windlass.models.layer_stack import LayerStack, layer_sharding
from windlass.models.check_shardable import sharding_errors
from windlass.models.tensor_parallel.collectives import TensorParallelRank
from windlass.models.tensor_parallel.shard_module import shard_layer
from windlass.models.tensor_parallel.shard_params import ParamShard, param_shards
from windlass.schema.graph import Graph, LayerCost, LayerKind, LayerRun, ParameterInfo, Precision
from windlass.schema.tensor_grid import grid_columns, tensor_grid

_DTYPES: dict[Precision, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_LONGEST = 64
"""Sequences of the trial runs stay below; longer ones tell nothing new."""
_SHORTEST = 9
_CHECK_MICRO = 5
_SLICE_TOKENS = ((4, 8, 12, 15), (2, 3, 4, 5))
"""Tokens of a slice in its trial runs, the last to check at; the second where a model takes only
short sequences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Subject:
    """A layer to be run, whole or one slice's twin."""

    chain: LayerStack
    index: int
    layer: nn.Module
    place: TensorParallelRank
    """Of the first slice."""
    width: int | None
    """Of its input, of a slice's own features; None if it takes tokens."""

    @property
    def last(self) -> bool:
        """Whether the loss follows."""
        return self.index == len(self.chain.layers) - 1

    @property
    def name(self) -> str:
        """For messages."""
        slices = f" in {_named(self.place)} slices" if self.place.degree > 1 else ""
        return f"layer `{self.chain.names[self.index]}` of model `{self.chain.name}`{slices}"


def capture_graph(stack: LayerStack) -> Graph:
    """The graph of a chain: ops, bytes and FLOP of each kind of layer, forward and backward.

    The last layer's costs include the mean cross-entropy of its logits, in float32.

    Raises:
        ModelError: a layer cannot run without numbers, takes only very short sequences, or does
            something whose cost is no polynomial of micro-batch and sequence.
    """
    return Graph(
        name=stack.name,
        vocabulary=stack.vocabulary,
        max_sequence=stack.max_sequence,
        layer_runs=tuple(_spans(stack.kinds)),
        kinds=_kinds(stack, TensorParallelRank(degree=1)),
    )


def capture_tensor_shards(stack: LayerStack, graph: Graph, degrees: Iterable[int]) -> Graph:
    """The graph with what one slice computes of each kind of layer, cut over each of `degrees`.

    A degree that cannot be is noted with what is wrong.

    Args:
        chain: that the graph was captured from.
        graph: whole, perhaps with slices of other degrees.
        degrees: 2 or more each, numbers or grids.

    Raises:
        ModelError: as `capture`, of a slice.
    """
    slices, uncut = dict(graph.tensor_shards), dict(graph.unshardable)
    for degree in degrees:
        place = TensorParallelRank(degree=int(degree), columns=grid_columns(degree))
        found = (*sharding_errors(stack, place.degree, columns=place.columns), *_too_short(stack, place))
        if found:
            uncut[degree] = found
        else:
            slices[degree] = _kinds(stack, place)
    return graph.model_copy(update={"slices": slices, "uncut": uncut})


def _kinds(chain: LayerStack, place: TensorParallelRank) -> dict[str, LayerKind]:
    kinds: dict[str, LayerKind] = {}
    widths: dict[str, tuple[int | None, int]] = {}
    width: int | None = None
    for index, (name, kind) in enumerate(zip(chain.names, chain.kinds, strict=True)):
        if kind not in kinds:
            kinds[kind], out = _kind(chain, index, width, place)
            widths[kind] = (width, out)
        taken, out = widths[kind]
        if taken != width:
            raise ModelError(
                f"layer `{name}` of model `{chain.name}` takes vectors of {width}, other layers "
                f"of its kind take {taken}; give every layer the same width"
            )
        width = out
    return kinds


def _kind(chain: LayerStack, index: int, width: int | None, place: TensorParallelRank) -> tuple[LayerKind, int]:
    """One kind of layer, by its first layer, and the width of what that layer gives."""
    costs: list[LayerCost] = []
    out = 0
    layer = chain.layers[index]
    if place.degree > 1:
        last = index == len(chain.layers) - 1
        layer = shard_layer(layer, layer_sharding(chain, index), place, last=last)
    subject = _Subject(chain=chain, index=index, layer=layer, place=place, width=width)
    looks_up = is_embedding_only(layer)
    for precision in _DTYPES:
        fitted, out = _fitted(subject, precision)
        costs += (
            embedding_costs(fitted, precision)
            if looks_up
            else (eager_cost(fitted, precision), compiled_cost(fitted, precision))
        )
    kind = LayerKind(
        name=chain.kinds[index],
        parameters=tuple(_parameters(subject)),
        costs=tuple(costs),
        is_embedding=looks_up,
        selective_costs=tuple(_selective_costs(subject)),
    )
    return kind, out


def _selective_costs(subject: _Subject) -> Iterator[LayerCost]:
    """What a layer between the ends costs that keeps only what its large products give.

    None of one that changes what is kept in place, which is refused: it can still be run as it is.
    """
    if subject.width is None or subject.last:
        return
    with suppress(ModelError):
        fitted = [_fitted(subject, each, selectively=True)[0] for each in _DTYPES]
        yield from map(eager_cost, fitted, _DTYPES)


def _parameters(subject: _Subject) -> Iterator[ParameterInfo]:
    chain, index = subject.chain, subject.index
    own = {}
    if subject.place.degree > 1:
        own = param_shards(chain.layers[index], layer_sharding(chain, index), subject.place)
    for name, parameter in subject.layer.named_parameters(remove_duplicate=False):
        owner, piece = chain.tied_weights.get(f"{chain.names[index]}.{name}"), own.get(name)
        yield ParameterInfo(
            name=name,
            shape=tuple(parameter.shape),
            tied_to=owner,
            shard_dim=None if piece is None else _shared_by_all(piece),
            replicated_over=None if piece is None else piece.replicated_over,
        )


def _shared_by_all(piece: ParamShard) -> int | None:
    """The only dimension along which a parameter is cut, if all slices share it along that one."""
    dims = [dim for dim, ranges in enumerate(piece.ranges) if ranges is not None]
    return dims[0] if piece.replicated_over is None and len(dims) == 1 else None


def _fitted(
    subject: _Subject, precision: Precision, *, selectively: bool = False
) -> tuple[FittedTrace, int]:
    """The layer's trace with its numbers as polynomials, and the width of its output."""
    *fit_at, check_at = _sequences(subject.chain, subject.place)
    points = [(micro, sequence) for micro in FIT_MICROBATCHES for sequence in fit_at]
    check = (_CHECK_MICRO, check_at)
    at = {
        point: _run(subject, precision, point, selectively=selectively)
        for point in (*points, check)
    }
    first = at[points[0]]
    for point, recording in at.items():
        if recording.trace != first.trace:
            raise _not_one_polynomial(subject, point, "other operations")
    columns = {point: recording.numbers for point, recording in at.items()}
    numbers = tuple(
        fit_polynomial({point: columns[point][place] for point in points}, fit_at)
        for place in range(len(first.numbers))
    )
    if any(q.at(*check) != seen for q, seen in zip(numbers, columns[check], strict=True)):
        raise _not_one_polynomial(subject, check, "another amount of work")
    return FittedTrace(trace=first.trace, numbers=numbers), first.output_shape[-1]


def _not_one_polynomial(subject: _Subject, point: tuple[int, int], difference: str) -> ModelError:
    return ModelError(
        f"{subject.name} does {difference} at micro-batch {point[0]}, sequence {point[1]} than its "
        "other sizes tell; its work must be a polynomial of both, at most linear in the "
        "micro-batch and quadratic in the sequence, so let its "
        "code not branch on sizes"
    )


def _run(
    subject: _Subject, precision: Precision, point: tuple[int, int], *, selectively: bool
) -> RecordedPass:
    targets = point if subject.last else None
    dtype = _DTYPES[precision]
    try:
        return record_layer(
            subject.layer, _input(subject, point), dtype=dtype, target_shape=targets,
            selective=selectively,
        )  # fmt: skip
    except Exception as error:
        raise ModelError(
            f"{subject.name} cannot run without numbers in {precision} at micro-batch {point[0]}, "
            f"sequence {point[1]}: "
            f"{type(error).__name__}: {' '.join(str(error).split())[:300]}; let its code not "
            "depend on the values of tensors, and hold constant tensors as buffers"
        ) from error


def _input(subject: _Subject, point: tuple[int, int]) -> Callable[[], Tensor]:
    """Makes all tokens for the first layer, the slice's own vectors for any other."""
    (micro, sequence), width = point, subject.width
    if width is None:
        return lambda: torch.zeros(point, dtype=torch.int64)
    return lambda: torch.empty(micro, sequence // subject.place.rows, width)


def _too_short(chain: LayerStack, place: TensorParallelRank) -> Iterator[str]:
    least = place.rows * _SLICE_TOKENS[-1][-1] + 1
    if chain.max_sequence is not None and chain.max_sequence < least:
        yield (
            f"model `{chain.name}` takes sequences of at most {chain.max_sequence} tokens, must "
            f"take {least} to be measured in {_named(place)} slices; lower the degree"
        )


def _named(place: TensorParallelRank) -> str:
    return str(tensor_grid(place.rows, place.columns))


def _sequences(chain: LayerStack, place: TensorParallelRank) -> tuple[int, int, int, int]:
    """Three lengths to fit at and one to check at, all shorter than the model's longest."""
    if place.degree > 1:
        rows = place.rows
        longest = chain.max_sequence or _LONGEST * rows
        own = next(own for own in _SLICE_TOKENS if rows * own[-1] < longest)
        first, second, third, check = (rows * tokens for tokens in own)
        return first, second, third, check
    longest = _LONGEST if chain.max_sequence is None else min(_LONGEST, chain.max_sequence)
    if longest < _SHORTEST:
        raise ModelError(
            f"model `{chain.name}` takes sequences of at most {longest} tokens, must take "
            f"{_SHORTEST} to be measured"
        )
    # The full length would turn a slice of the position table into the table itself.
    check = longest - 1
    return check // 4, check // 2, 3 * check // 4, check


def _spans(kinds: tuple[str, ...]) -> Iterator[LayerRun]:
    """Neighbours of one kind together."""
    start = 0
    for place in range(1, len(kinds) + 1):
        if place == len(kinds) or kinds[place] != kinds[start]:
            yield LayerRun(kind=kinds[start], count=place - start)
            start = place
