"""Tied weights: which layers own the weights that a layer borrows, and which stages lend them."""

from collections.abc import Sequence
from typing import NamedTuple

from windlass.program.device_mesh import stages_by_layer
from windlass.schema.graph import Graph, ParameterInfo
from windlass.schema.plan import Plan


class Loan(NamedTuple):
    """Weights that one stage owns and another computes with.

    In each step the owner lends them as soon as they are whole and up to date, and takes over their
    gradient once the borrower has summed it.
    """

    owner_layer: int
    """The layer that owns them."""
    user_layer: int
    """The first of the borrower's layers that uses them. Messages of this loan carry its index."""
    owner_stage: int
    """The owner's stage."""
    user_stage: int
    """The other stage."""
    elements: int
    """Numbers lent: only those that are tied, not all that the owner has."""


def owners(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """For each layer, the indices of the layers that own weights it borrows.

    A tie names its owner as `<layer>.<name inside>`. A graph folds its layers and so has no layer
    names: the owner is the first layer with a weight of that inner name and shape.

    Raises:
        ValueError: a tie without an owner in the chain.
    """
    starts = _starts(graph)
    borrowed = {
        kind: tuple(
            dict.fromkeys(
                _owner(graph, starts, parameter)
                for parameter in graph.kinds[kind].parameters
                if parameter.tied_to is not None
            )
        )
        for kind in graph.kinds
    }
    return tuple(borrowed[span.kind] for span in graph.chain for _ in range(span.count))


def shared(stages: Sequence[int], graph: Graph) -> dict[int, int]:
    """Elements of each layer that a later one of its stage uses: their gradient is there first.

    Args:
        stages: of each layer.
        graph: the chain, whole or one of its slices.

    Raises:
        ValueError: a tie without an owner in the chain.
    """
    found: dict[int, int] = {}
    kinds = tuple(graph.layer_kinds())
    for layer, owned_by in enumerate(owners(graph)):
        if not owned_by:
            continue
        tied = sum(p.count for p in kinds[layer].parameters if p.tied_to is not None)
        for owner in {at for at in owned_by if at != layer and stages[at] == stages[layer]}:
            found[owner] = found.get(owner, 0) + tied
    return found


def loans(plan: Plan, graph: Graph, index: int = 0) -> tuple[Loan, ...]:
    """All loans of a plan, those of each borrowing stage in the order of their layers.

    Args:
        plan: the plan.
        graph: that it cuts.
        index: of the slice that lends to and borrows from its like.

    Raises:
        ValueError: a tie without an owner in the chain.
    """
    if plan.parallel.pipeline == 1:
        return ()
    part = graph.shard(plan.parallel.tensor, index)
    starts, stages = _starts(part), stages_by_layer(plan)
    borrowed = owners(part)
    first: dict[tuple[int, int], int] = {}
    tied: dict[tuple[int, int], dict[str, int]] = {}
    kinds = tuple(part.layer_kinds())
    for layer, stage in enumerate(stages[: graph.layers]):
        for owner in borrowed[layer]:
            if stages[owner] != stage:
                first.setdefault((stage, owner), layer)
                tied.setdefault((stage, owner), {}).update(
                    (str(parameter.tied_to), parameter.count)
                    for parameter in kinds[layer].parameters
                    if parameter.tied_to is not None and _owner(part, starts, parameter) == owner
                )
    return tuple(
        Loan(owner, layer, stages[owner], stage, sum(tied[stage, owner].values()))
        for (stage, owner), layer in first.items()
    )


def _starts(graph: Graph) -> list[tuple[int, str]]:
    """The first layer of each span of the chain, and its kind."""
    starts: list[tuple[int, str]] = []
    layer = 0
    for span in graph.chain:
        starts.append((layer, span.kind))
        layer += span.count
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
