"""Makes the graph of a transformer from its configuration."""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import groupby
from math import prod

from windlass.capture.analytic.modules.transformer import LayerType, layer_sequence, layer_types
from windlass.capture.analytic.ops.collectives import Rank
from windlass.capture.analytic.record import layer_scope, record_layer
from windlass.capture.eager_ops import eager_cost, embedding_costs
from windlass.capture.fused_ops import compiled_cost
from windlass.capture.trace import NamedTrace
from windlass.models import ResNetConfig, TransformerConfig
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


def parameter_count(config: TransformerConfig | ResNetConfig) -> int:
    """Number of parameters, as a model's graph counts them: what layers share counts once."""
    if isinstance(config, ResNetConfig):
        return _count_resnet(config)
    counts = {layer: _count_layer(layer) for layer in layer_types(config)}
    if config.image is None:
        return sum(counts[layer] for layer in layer_sequence(config))
    blocks = sum(counts[layer] for layer in layer_sequence(config) if layer.place == "inner")
    return blocks + _count_image_ends(config)


def _count_layer(layer: LayerType) -> int:
    scope = layer_scope(layer, Rank(), "float32")
    layer.build(scope)
    return sum(prod(info.shape) for info, _ in scope.parameters if info.tied_to is None)


def _count_image_ends(config: TransformerConfig) -> int:
    """The patches, class token, positions, final norm and classes of a vision transformer."""
    d, classes = config.width, config.vocabulary
    patches = d * (config.image_shape[0] * config.patch**2 + 1)
    head = classes * (d + config.head_bias)
    return patches + (1 + config.sequence) * d + 2 * d + head


def _count_resnet(config: ResNetConfig) -> int:
    count = _convolution(config.image[0], config.stem_width, 3 if config.stem == "small" else 7)
    inputs = config.stem_width
    for stage, (depth, outputs) in enumerate(zip(config.depths, config.widths, strict=True)):
        halves = stage > 0 or config.halves_first_stage
        if depth and (halves or inputs != outputs):
            count += _convolution(inputs, outputs, 1)  # the shortcut
        for _ in range(depth):
            count += _count_residual_branch(inputs, outputs, is_bottleneck=config.bottleneck)
            inputs = outputs
    return count + config.classes * (inputs + 1)


def _count_residual_branch(inputs: int, outputs: int, *, is_bottleneck: bool) -> int:
    if not is_bottleneck:
        return _convolution(inputs, outputs, 3) + _convolution(outputs, outputs, 3)
    inner = outputs // 4
    ends = _convolution(inputs, inner, 1) + _convolution(inner, outputs, 1)
    return ends + _convolution(inner, inner, 3)


def _convolution(inputs: int, outputs: int, size: int) -> int:
    """A convolution without bias, and the two parameters a channel of the norm behind it."""
    return outputs * (inputs * size**2 + 2)
