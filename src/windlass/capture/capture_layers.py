"""Captures a layer stack as a graph of ops, without allocating its weights.

One layer of each kind is recorded and fitted (`recording/layer_fit.py`). For a tensor-parallel
degree the first rank's sharded layers run instead: which ops fuse and what is saved does not follow
from other degrees, nor does an uneven vocabulary.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain

from torch import nn

from windlass.capture.eager_ops import eager_cost, embedding_costs
from windlass.capture.fused_ops import compiled_cost
from windlass.capture.recording.layer_fit import (
    CAPTURED_DTYPES,
    BoundaryShape,
    LayerUnderTest,
    fit_layer,
    sequence_errors,
)
from windlass.capture.trace import NamedTrace
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
)


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

    Raises:
        ModelError: as in `capture_graph`.
    """
    traces: dict[str, NamedTrace] = {}
    shapes: dict[str, BoundaryShape] = {}
    inputs = _first_inputs(stack)
    for index, kind in enumerate(stack.kinds):
        if kind not in traces:
            layer = stack.layers[index]
            subject = LayerUnderTest(
                stack=stack, index=index, layer=layer, tp_rank=TensorParallelRank(degree=1),
                inputs=inputs,
            )  # fmt: skip
            fitted, shapes[kind] = fit_layer(subject, precision)
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
        degrees: tensor-parallel degrees of 2 or more, numbers or grids.
    """
    unshardable = dict(graph.unshardable)
    for degree in degrees:
        rank = _first_rank(degree)
        errors = (
            *sharding_errors(stack, rank.degree, columns=rank.columns),
            *sequence_errors(stack, rank),
        )
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
    subject = LayerUnderTest(stack=stack, index=index, layer=layer, tp_rank=tp_rank, inputs=inputs)
    is_embedding = is_embedding_only(layer)
    for precision in CAPTURED_DTYPES:
        fitted, output = fit_layer(subject, precision)
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


def _selective_costs(subject: LayerUnderTest) -> Iterator[LayerCost]:
    """Costs of an inner layer with selective activation checkpointing.

    There are none for a layer that modifies kept outputs in place: it can still run without. Nor
    for one with running statistics, which a second forward pass would change again.
    """
    if subject.first or subject.last or norm_statistics(subject.layer):
        return
    with suppress(ModelError):
        fitted = [fit_layer(subject, precision, selective=True)[0] for precision in CAPTURED_DTYPES]
        yield from map(eager_cost, fitted, CAPTURED_DTYPES)


def _fused_costs(subject: LayerUnderTest) -> Iterator[LayerCost]:
    """Costs of the last layer with its loss fused, if one device has all of it."""
    kinds = subject.stack.kinds
    is_alone = subject.last and kinds.count(kinds[-1]) == 1 and subject.tp_rank.degree == 1
    # An example has one target: there are no many logits to keep from memory.
    if subject.inputs is None or subject.stack.examples is not None or not is_alone:
        return
    if not can_fuse_loss(subject.layer, subject.inputs[-1]):
        return
    for precision in CAPTURED_DTYPES:
        fitted, _ = fit_layer(subject, precision, fused=True)
        yield from (eager_cost(fitted, precision), compiled_cost(fitted, precision))


def _parameters(subject: LayerUnderTest) -> Iterator[ParameterInfo]:
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


def _layer_runs(kinds: tuple[str, ...]) -> Iterator[LayerRun]:
    """Runs of consecutive layers of one kind."""
    start = 0
    for index in range(1, len(kinds) + 1):
        if index == len(kinds) or kinds[index] != kinds[start]:
            yield LayerRun(kind=kinds[start], count=index - start)
            start = index
