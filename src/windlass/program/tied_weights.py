"""Tied weights: which layer owns the weights that another layer uses too, and on which stages."""

from collections.abc import Sequence
from typing import NamedTuple

from windlass.program.device_mesh import stages_by_layer
from windlass.schema import Graph, ParameterInfo, Plan


class TiedWeights(NamedTuple):
    """Weights that one stage owns and another stage computes with.

    In each step the owner sends them as soon as they are unsharded and up to date, and accumulates
    their gradient once the user has summed it over its micro-batches.
    """

    owner_layer: int
    user_layer: int
    """The first layer of the user stage that uses them. Messages carry its index."""
    owner_stage: int
    user_stage: int
    elements: int
    """Number of tied elements; the owner layer may have more."""
    gradient_elements: int
    """Those of them that are trained: frozen ones are sent, and no gradient comes back."""


def tied_owner_layers(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """For each layer, the indices of the layers that own its tied weights.

    A tied parameter names its owner as `<layer>.<parameter>`. A graph folds equal layers and so has
    no layer names: the owner is the first layer with a parameter of that name and shape.

    Raises:
        ValueError: no layer owns a tied parameter.
    """
    starts = _run_starts(graph)
    owners = {
        kind: tuple(
            dict.fromkeys(
                _owner(graph, starts, parameter)
                for parameter in graph.kinds[kind].parameters
                if parameter.tied_to is not None
            )
        )
        for kind in graph.kinds
    }
    return tuple(owners[run.kind] for run in graph.layer_runs for _ in range(run.count))


def tied_elements_within_stage(stages: Sequence[int], graph: Graph) -> dict[int, int]:
    """Trained elements of each owner layer that another layer of the same stage uses.

    Args:
        stages: stage of each layer, [layer].

    Raises:
        ValueError: no layer owns a tied parameter.
    """
    elements: dict[int, int] = {}
    kinds = tuple(graph.layer_kinds())
    for layer, owners in enumerate(tied_owner_layers(graph)):
        if not owners:
            continue
        tied = sum(
            p.count for p in kinds[layer].parameters if p.tied_to is not None and not p.frozen
        )
        for owner in {o for o in owners if o != layer and stages[o] == stages[layer]}:
            elements[owner] = elements.get(owner, 0) + tied
    return elements


def tied_across_stages(plan: Plan, graph: Graph, tensor_rank: int = 0) -> tuple[TiedWeights, ...]:
    """All tied weights whose owner and user are on different stages, by user stage and layer.

    Args:
        tensor_rank: tensor-parallel rank whose shard is sent; it sends to its own rank elsewhere.

    Raises:
        ValueError: no layer owns a tied parameter.
    """
    if plan.parallel.pipeline == 1:
        return ()
    shard = graph.shard(plan.parallel.tensor, tensor_rank)
    starts, stages = _run_starts(shard), stages_by_layer(plan)
    owners = tied_owner_layers(shard)
    first_user: dict[tuple[int, int], int] = {}
    tied: dict[tuple[int, int], dict[str, ParameterInfo]] = {}
    kinds = tuple(shard.layer_kinds())
    for layer, stage in enumerate(stages[: graph.layers]):
        for owner in owners[layer]:
            if stages[owner] != stage:
                first_user.setdefault((stage, owner), layer)
                tied.setdefault((stage, owner), {}).update(
                    (str(parameter.tied_to), parameter)
                    for parameter in kinds[layer].parameters
                    if parameter.tied_to is not None and _owner(shard, starts, parameter) == owner
                )
    return tuple(
        TiedWeights(
            owner, layer, stages[owner], stage, sum(each.count for each in parameters),
            sum(each.count for each in parameters if not each.frozen),
        )
        for (stage, owner), layer in first_user.items()
        for parameters in (tied[stage, owner].values(),)
    )  # fmt: skip


def _run_starts(graph: Graph) -> list[tuple[int, str]]:
    """The first layer of each run of equal layers, and its kind."""
    starts: list[tuple[int, str]] = []
    layer = 0
    for run in graph.layer_runs:
        starts.append((layer, run.kind))
        layer += run.count
    return starts


def _owner(graph: Graph, starts: list[tuple[int, str]], tied: ParameterInfo) -> int:
    for layer, kind in starts:
        for parameter in graph.kinds[kind].parameters:
            if (
                parameter.tied_to is None
                and parameter.shape == tied.shape
                and f".{tied.tied_to}".endswith(f".{parameter.name}")
            ):
                return layer
    raise ValueError(f"`{tied.name}` is tied to `{tied.tied_to}`, which no layer of the graph owns")
