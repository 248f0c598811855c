"""Captures a layer stack as a graph of ops, without allocating its weights.

One layer of each kind runs forward and backward at a few sizes, on fake tensors. Every count is
then fitted as a polynomial of micro-batch and sequence, and checked at one more size. For a
tensor-parallel degree the first rank's sharded layers run instead: which ops fuse and what is saved
does not follow from other degrees, nor does an uneven vocabulary.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn

from windlass.capture.eager_ops import eager_cost, embedding_costs
from windlass.capture.fused_ops import compiled_cost
from windlass.capture.polynomial_fit import FIT_MICRO_BATCHES, fit_polynomial
from windlass.capture.recorder import RecordedPass, record_layer
from windlass.capture.trace import FittedTrace, NamedTrace
from windlass.errors import ModelError
from windlass.models import (
    LayerStack,
    ParamShard,
    TensorParallelRank,
    can_fuse_loss,
    chooses_attention,
    expert_parameters,
    is_embedding_only,
    layer_sharding,
    norm_statistics,
    param_shards,
    shard_layer,
    sharding_errors,
    sliding_window,
)
from windlass.schema import (
    Graph,
    LayerCost,
    LayerKind,
    LayerRun,
    ParameterInfo,
    Precision,
    grid_columns,
    tensor_degree,
)

_DTYPES: dict[Precision, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_MAX_SEQUENCE = 64
"""Upper limit of the sequences that are run; longer ones add no information."""
_MIN_SEQUENCE = 9
"""Shortest longest sequence of a model that can be captured."""
_CHECK_MICRO_BATCH = 5
_SHARD_TOKENS = ((4, 8, 12, 15), (2, 3, 4, 5))
"""Tokens of one rank in the runs of a sharded layer: three to fit at and one to check at. The
second row is for models that take only short sequences."""


BoundaryShape = tuple[int, ...]
"""What passes between two layers: the shape of one example, or of a token, `(d,)`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerUnderTest:
    """A layer to record, full or sharded."""

    stack: LayerStack
    index: int
    layer: nn.Module
    tp_rank: TensorParallelRank
    """The first tensor-parallel rank."""
    inputs: BoundaryShape | None
    """Shape of the input, of one rank; None if the layer takes tokens."""

    @property
    def last(self) -> bool:
        """Whether the loss follows."""
        return self.index == len(self.stack.layers) - 1

    @property
    def first(self) -> bool:
        """Whether it takes what the data give."""
        return self.index == 0

    @property
    def description(self) -> str:
        """How error messages name the layer."""
        sharded = f" on {_degree(self.tp_rank)} ranks" if self.tp_rank.degree > 1 else ""
        return f"layer `{self.stack.names[self.index]}` of model `{self.stack.name}`{sharded}"


def capture_graph(stack: LayerStack) -> Graph:
    """The graph of a stack: ops, bytes and FLOP of each kind of layer, forward and backward.

    The costs of the last layer include the mean cross-entropy of its logits, in float32.

    Raises:
        ModelError: a layer cannot run on fake tensors, takes only very short sequences, or has a
            cost that is not a polynomial of micro-batch and sequence.
    """
    return Graph(
        name=stack.name,
        vocabulary=stack.vocabulary,
        max_sequence=stack.max_sequence,
        examples=stack.examples,
        layer_runs=tuple(_layer_runs(stack.kinds)),
        kinds=_capture_kinds(stack, TensorParallelRank(degree=1)),
    )


def capture_traces(stack: LayerStack, precision: Precision) -> dict[str, NamedTrace]:
    """The calls and buffers of each kind of layer of a stack.

    Args:
        stack: the stack.
        precision: float32 or bfloat16.

    Raises:
        ModelError: as in `capture_graph`.
    """
    traces: dict[str, NamedTrace] = {}
    shapes: dict[str, BoundaryShape] = {}
    inputs = _first_inputs(stack)
    for index, kind in enumerate(stack.kinds):
        if kind not in traces:
            layer = stack.layers[index]
            subject = _LayerUnderTest(
                stack=stack, index=index, layer=layer, tp_rank=TensorParallelRank(degree=1),
                inputs=inputs,
            )  # fmt: skip
            fitted, shapes[kind] = _fit(subject, precision)
            traces[kind] = NamedTrace(fitted=fitted, parameters=tuple(_state_names(layer)))
        inputs = shapes[kind]
    return traces


def _first_inputs(stack: LayerStack) -> BoundaryShape | None:
    """Shape of one example that the first layer takes; None if it takes tokens."""
    return None if stack.examples is None else stack.examples.inputs


def _state_names(layer: nn.Module) -> Iterator[str]:
    """Names of a layer's parameters and buffers, each tensor once, in the order of `fake_state`."""
    seen: set[int] = set()
    parameters = layer.named_parameters(remove_duplicate=False)
    for name, tensor in chain(parameters, layer.named_buffers(remove_duplicate=False)):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name


def capture_tensor_shards(stack: LayerStack, graph: Graph, degrees: Iterable[int]) -> Graph:
    """Adds to a graph what one rank computes of each kind of layer, at each tensor-parallel degree.

    A degree over which the stack cannot be sharded is recorded with the reasons.

    Args:
        stack: the stack that the graph was captured from.
        graph: the graph, which may have shards of other degrees already.
        degrees: tensor-parallel degrees of 2 or more, numbers or grids.

    Raises:
        ModelError: as in `capture_graph`, for a sharded layer.
    """
    graph = check_tensor_degrees(stack, graph, degrees := tuple(degrees))
    shards = dict(graph.tensor_shards)
    for degree in degrees:
        if degree not in graph.unshardable:
            shards[degree] = _capture_kinds(stack, _first_rank(degree))
    return graph.model_copy(update={"tensor_shards": shards})


def check_tensor_degrees(stack: LayerStack, graph: Graph, degrees: Iterable[int]) -> Graph:
    """Adds to a graph why its stack cannot be sharded over some degrees; it captures nothing.

    Args:
        stack: the stack that the graph was captured from.
        graph: the graph.
        degrees: tensor-parallel degrees of 2 or more, numbers or grids.
    """
    unshardable = dict(graph.unshardable)
    for degree in degrees:
        rank = _first_rank(degree)
        errors = (
            *sharding_errors(stack, rank.degree, columns=rank.columns),
            *_sequence_errors(stack, rank),
        )
        if stack.examples is not None:
            error = (
                f"model `{stack.name}` takes {stack.examples.noun}, and only models of tokens are "
                "cut by tensor parallelism so far; set `parallel.tensor=1`"
            )
            errors = (error,)
        if errors:
            unshardable[degree] = errors
    return graph.model_copy(update={"unshardable": unshardable})


def _first_rank(degree: int) -> TensorParallelRank:
    return TensorParallelRank(degree=int(degree), columns=grid_columns(degree))


def _capture_kinds(stack: LayerStack, tp_rank: TensorParallelRank) -> dict[str, LayerKind]:
    kinds: dict[str, LayerKind] = {}
    outputs: dict[str, BoundaryShape] = {}
    inputs = _first_inputs(stack)
    for index, kind in enumerate(stack.kinds):
        if kind not in kinds:
            kinds[kind], outputs[kind] = _capture_kind(stack, index, inputs, tp_rank)
        inputs = outputs[kind]
    return kinds


def _capture_kind(
    stack: LayerStack, index: int, inputs: BoundaryShape | None, tp_rank: TensorParallelRank
) -> tuple[LayerKind, BoundaryShape]:
    """One kind of layer, captured from its first layer, and the shape of that layer's output."""
    costs: list[LayerCost] = []
    output: BoundaryShape = ()
    layer = stack.layers[index]
    if tp_rank.degree > 1:
        last = index == len(stack.layers) - 1
        layer = shard_layer(layer, layer_sharding(stack, index), tp_rank, last=last)
    subject = _LayerUnderTest(stack=stack, index=index, layer=layer, tp_rank=tp_rank, inputs=inputs)
    is_embedding = is_embedding_only(layer)
    for precision in _DTYPES:
        fitted, output = _fit(subject, precision)
        costs += (
            embedding_costs(fitted, precision)
            if is_embedding
            else (eager_cost(fitted, precision), compiled_cost(fitted, precision))
        )
    kind = LayerKind(
        name=stack.kinds[index],
        parameters=tuple(_parameters(subject)),
        costs=tuple(costs),
        is_embedding=is_embedding,
        is_hidden=0 < index < len(stack.layers) - 1,
        selective_costs=tuple(_selective_costs(subject)),
        fused_costs=tuple(_fused_costs(subject)),
        chooses_attention=chooses_attention(layer),
        sliding_window=sliding_window(layer),
    )
    return kind, output


def _selective_costs(subject: _LayerUnderTest) -> Iterator[LayerCost]:
    """Costs of an inner layer with selective activation checkpointing.

    There are none for a layer that modifies kept outputs in place: it can still run without. Nor
    for one with running statistics, which a second forward pass would change again.
    """
    if subject.first or subject.last or norm_statistics(subject.layer):
        return
    with suppress(ModelError):
        fitted = [_fit(subject, precision, selective=True)[0] for precision in _DTYPES]
        yield from map(eager_cost, fitted, _DTYPES)


def _fused_costs(subject: _LayerUnderTest) -> Iterator[LayerCost]:
    """Costs of the last layer with its loss fused, if one device has all of it."""
    kinds = subject.stack.kinds
    is_alone = subject.last and kinds.count(kinds[-1]) == 1 and subject.tp_rank.degree == 1
    # An example has one target: there are no many logits to keep from memory.
    if subject.inputs is None or subject.stack.examples is not None or not is_alone:
        return
    if not can_fuse_loss(subject.layer, subject.inputs[-1]):
        return
    for precision in _DTYPES:
        fitted, _ = _fit(subject, precision, fused=True)
        yield from (eager_cost(fitted, precision), compiled_cost(fitted, precision))


def _parameters(subject: _LayerUnderTest) -> Iterator[ParameterInfo]:
    stack, index = subject.stack, subject.index
    shards = {}
    if subject.tp_rank.degree > 1:
        shards = param_shards(stack.layers[index], layer_sharding(stack, index), subject.tp_rank)
    stacked = expert_parameters(subject.layer)
    for name, parameter in subject.layer.named_parameters(remove_duplicate=False):
        shard = shards.get(name)
        yield ParameterInfo(
            name=name,
            shape=tuple(parameter.shape),
            tied_to=stack.tied_weights.get(f"{stack.names[index]}.{name}"),
            shard_dim=None if shard is None else _only_sharded_dim(shard),
            replicated_over=None if shard is None else shard.replicated_over,
            frozen=None if parameter.requires_grad else True,
            expert=True if name in stacked else None,
        )


def _only_sharded_dim(shard: ParamShard) -> int | None:
    """The only dimension along which a parameter is sharded, if all ranks share it along that."""
    dims = [dim for dim, ranges in enumerate(shard.ranges) if ranges is not None]
    return dims[0] if shard.replicated_over is None and len(dims) == 1 else None


def _fit(
    subject: _LayerUnderTest, precision: Precision, *, selective: bool = False, fused: bool = False
) -> tuple[FittedTrace, BoundaryShape]:
    """The layer's trace with its numbers as polynomials, and the shape of its output.

    The output of a fused loss has none.
    """
    *fit_sequences, check_sequence = _sequences(subject.stack, subject.tp_rank)
    points = [(micro, sequence) for micro in FIT_MICRO_BATCHES for sequence in fit_sequences]
    check = (_CHECK_MICRO_BATCH, check_sequence)
    passes = {
        point: _record(subject, precision, point, selective=selective, fused=fused)
        for point in (*points, check)
    }
    first = passes[points[0]]
    for point, recorded in passes.items():
        if recorded.trace != first.trace:
            raise _not_one_polynomial(subject, point, "other operations")
    numbers = {point: recorded.numbers for point, recorded in passes.items()}
    polynomials = tuple(
        fit_polynomial({point: numbers[point][index] for point in points}, fit_sequences)
        for index in range(len(first.numbers))
    )
    fitted = zip(polynomials, numbers[check], strict=True)
    if any(polynomial.at(*check) != number for polynomial, number in fitted):
        raise _not_one_polynomial(subject, check, "another amount of work")
    # The second and the third number of a text's shape are tokens and features.
    behind = 2 if subject.stack.examples is None else 1
    shape = () if fused else first.output_shape[behind:]
    return FittedTrace(trace=first.trace, numbers=polynomials), shape


def _not_one_polynomial(
    subject: _LayerUnderTest, point: tuple[int, int], difference: str
) -> ModelError:
    return ModelError(
        f"{subject.description} does {difference} at micro-batch {point[0]}, sequence {point[1]} "
        "than at other sizes; its work must be a polynomial of both, at most linear in the "
        "micro-batch and quadratic in the sequence, so its code must not branch on sizes"
    )


def _record(
    subject: _LayerUnderTest,
    precision: Precision,
    point: tuple[int, int],
    *,
    selective: bool,
    fused: bool,
) -> RecordedPass:
    try:
        return record_layer(
            subject.layer,
            _input_factory(subject, point),
            dtype=_DTYPES[precision],
            is_first=subject.first,
            target_shape=_target_shape(subject, point),
            target_dtype=_target_dtype(subject),
            selective=selective,
            fused=fused,
        )
    except Exception as error:
        raise ModelError(
            f"{subject.description} cannot run on fake tensors in {precision} at micro-batch "
            f"{point[0]}, sequence {point[1]}: "
            f"{type(error).__name__}: {' '.join(str(error).split())[:300]}; its code must not "
            "depend on the values of tensors, and constant tensors must be buffers"
        ) from error


def _input_factory(subject: _LayerUnderTest, point: tuple[int, int]) -> Callable[[], Tensor]:
    """Makes all tokens for the first layer, the rank's own vectors for any other."""
    (micro, sequence), inputs = point, subject.inputs
    if inputs is None:
        return lambda: torch.zeros(point, dtype=torch.int64)
    if subject.stack.examples is not None:
        return lambda: torch.empty(micro, *inputs)
    return lambda: torch.empty(micro, sequence // subject.tp_rank.rows, *inputs)


def _target_shape(subject: _LayerUnderTest, point: tuple[int, int]) -> tuple[int, ...] | None:
    """Shape of the targets of the loss; None if it does not follow the layer."""
    if not subject.last:
        return None
    examples = subject.stack.examples
    if examples is None:
        return point
    return point[:1] if examples.numbers is None else (point[0], examples.numbers)


def _target_dtype(subject: _LayerUnderTest) -> torch.dtype:
    examples = subject.stack.examples
    return torch.float32 if examples is not None and examples.numbers else torch.int64


def _sequence_errors(stack: LayerStack, tp_rank: TensorParallelRank) -> Iterator[str]:
    least = tp_rank.rows * _SHARD_TOKENS[-1][-1] + 1
    if stack.max_sequence is not None and stack.max_sequence < least:
        yield (
            f"model `{stack.name}` takes sequences of at most {stack.max_sequence} tokens, must "
            f"take {least} to be captured on {_degree(tp_rank)} ranks; lower the degree"
        )


def _degree(tp_rank: TensorParallelRank) -> str:
    return str(tensor_degree(tp_rank.rows, tp_rank.columns))


def _sequences(stack: LayerStack, tp_rank: TensorParallelRank) -> tuple[int, int, int, int]:
    """Three lengths to fit at and one to check at, all shorter than the model's longest.

    What takes no tokens is fitted at one length, on which nothing depends.
    """
    if stack.examples is not None:
        return (stack.examples.positions,) * 4
    if tp_rank.degree > 1:
        rows = tp_rank.rows
        longest = stack.max_sequence or _MAX_SEQUENCE * rows
        tokens = next(row for row in _SHARD_TOKENS if rows * row[-1] < longest)
        first, second, third, check = (rows * count for count in tokens)
        return first, second, third, check
    limit = stack.max_sequence
    longest = _MAX_SEQUENCE if limit is None else min(_MAX_SEQUENCE, limit)
    if longest < _MIN_SEQUENCE:
        raise ModelError(
            f"model `{stack.name}` takes sequences of at most {longest} tokens, must take "
            f"{_MIN_SEQUENCE} to be captured"
        )
    # At the full length a slice of the position table would be the table itself.
    check = longest - 1
    return check // 4, check // 2, 3 * check // 4, check


def _layer_runs(kinds: tuple[str, ...]) -> Iterator[LayerRun]:
    """Runs of consecutive layers of one kind."""
    start = 0
    for index in range(1, len(kinds) + 1):
        if index == len(kinds) or kinds[index] != kinds[start]:
            yield LayerRun(kind=kinds[start], count=index - start)
            start = index
