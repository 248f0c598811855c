"""Makes the graph of a transformer from its configuration."""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import groupby

from windlass.capture.analytic.modules.transformer import LayerType, layer_sequence, layer_types
from windlass.capture.analytic.ops.collectives import Rank
from windlass.capture.analytic.record import layer_scope, record_layer
from windlass.capture.eager_ops import eager_cost, embedding_costs
from windlass.capture.fused_ops import compiled_cost
from windlass.capture.trace import NamedTrace
from windlass.models import TransformerConfig
from windlass.schema import (
    Graph,
    LayerCost,
    LayerKind,
    LayerRun,
    Precision,
    grid_columns,
    grid_rows,
)

_PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16")


def analytic_graph(config: TransformerConfig) -> Graph:
    """The graph of a transformer, as `capture_graph` captures it from the model itself."""
    runs = groupby(layer.kind for layer in layer_sequence(config))
    return Graph(
        name=config.name,
        vocabulary=config.vocabulary,
        max_sequence=config.sequence,
        layer_runs=tuple(LayerRun(kind=kind, count=len(list(layers))) for kind, layers in runs),
        kinds=_kinds(config, Rank()),
    )


def analytic_traces(config: TransformerConfig, precision: Precision) -> dict[str, NamedTrace]:
    """The calls and buffers of each kind of layer of a transformer."""
    traces: dict[str, NamedTrace] = {}
    for layer in layer_types(config):
        scope = layer_scope(layer, Rank(), precision)
        layer.build(scope)
        traces[layer.kind] = NamedTrace(
            fitted=record_layer(layer, Rank(), precision),
            parameters=tuple(info.name for info, _ in scope.parameters),
        )
    return traces


def analytic_tensor_shards(
    config: TransformerConfig, graph: Graph, degrees: Iterable[int]
) -> Graph:
    """Adds to a graph what one rank computes of each kind of layer, at each degree.

    A degree over which the model cannot be sharded is recorded with the reasons.

    Args:
        degrees: tensor-parallel degrees of 2 or more, numbers or grids.
    """
    graph = check_analytic_degrees(config, graph, degrees := tuple(degrees))
    shards = {
        degree: _kinds(config, _rank(degree))
        for degree in degrees
        if degree not in graph.unshardable
    }
    return graph.model_copy(update={"tensor_shards": {**graph.tensor_shards, **shards}})


def check_analytic_degrees(
    config: TransformerConfig, graph: Graph, degrees: Iterable[int]
) -> Graph:
    """Adds to a graph why its model cannot be sharded over some degrees.

    Args:
        degrees: tensor-parallel degrees of 2 or more, numbers or grids.
    """
    errors = {degree: tuple(_sharding_errors(config, _rank(degree))) for degree in degrees}
    unshardable = {degree: reasons for degree, reasons in errors.items() if reasons}
    return graph.model_copy(update={"unshardable": {**graph.unshardable, **unshardable}})


def _rank(degree: int) -> Rank:
    return Rank(grid_rows(degree), grid_columns(degree))


@lru_cache(maxsize=256)
def _kinds(config: TransformerConfig, rank: Rank) -> dict[str, LayerKind]:
    return {layer.kind: _kind(layer, rank) for layer in layer_types(config)}


def _kind(layer: LayerType, rank: Rank) -> LayerKind:
    is_plain = not (layer.config.dropout or layer.config.embedding_norm)
    is_embedding = layer.kind == "embedding" and is_plain
    costs: list[LayerCost] = []
    for precision in _PRECISIONS:
        fitted = record_layer(layer, rank, precision)
        costs += (
            embedding_costs(fitted, precision)
            if is_embedding
            else (eager_cost(fitted, precision), compiled_cost(fitted, precision))
        )
    selective = tuple(
        eager_cost(record_layer(layer, rank, precision, selective=True), precision)
        for precision in _PRECISIONS
        if layer.place == "inner"
    )
    fused: list[LayerCost] = []
    if layer.place == "last" and rank.degree == 1 and layer.config.logit_softcap is None:
        for precision in _PRECISIONS:
            fitted = record_layer(layer, rank, precision, fused=True)
            fused += (eager_cost(fitted, precision), compiled_cost(fitted, precision))
    scope = layer_scope(layer, rank, "float32")
    layer.build(scope)
    chooses = any(op.kind == "attention" for op in costs[0].forward)
    return LayerKind.model_construct(
        name=layer.kind,
        parameters=tuple(info for info, _ in scope.parameters),
        costs=tuple(costs),
        is_embedding=is_embedding,
        is_hidden=layer.place == "inner",
        selective_costs=selective,
        fused_costs=tuple(fused),
        chooses_attention=chooses,
        sliding_window=layer.config.visible_tokens if chooses else None,
    )


def _sharding_errors(config: TransformerConfig, rank: Rank) -> Iterator[str]:
    """Every reason why a model cannot be sharded, in the words of `models.sharding_errors`."""
    for layer in layer_types(config):
        scope = layer_scope(layer, rank, "float32")
        layer.build(scope)
        prefix = f"layer `{layer.name}` of model `{config.name}`: "
        for path, rule, total, ranks in scope.rules:
            if error := rule.divisibility_error(total, ranks):
                yield f"{prefix}`{path}` has {error}"
            elif error := scope.sparse.get(path):
                yield f"{prefix}`{path}` {error}"
        if rank.columns > 1 and scope.sparse:
            yield (
                f"{prefix}`{next(iter(scope.sparse))}` is sparse, which a grid of ranks does not "
                "cut; set `parallel.tensor` to one number"
            )
        elif config.width % rank.columns:
            for path in scope.feature_paths:
                yield (
                    f"{prefix}`{path}` has {config.width} features, which {rank.columns} columns "
                    "cannot share equally; use a number of columns that divides them"
                )
