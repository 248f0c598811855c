"""Tied weights: which earlier layers own the weights that a layer borrows."""

from windlass.spec.graph import Graph, Parameter


def owners(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """For each layer, the indices of the layers that own weights it borrows.

    A tie names its owner as `<layer>.<name inside>`. A graph folds its layers and so has no layer
    names: the owner is the first layer with a weight of that inner name and shape.

    Raises:
        ValueError: a tie without an owner in the chain.
    """
    starts: list[tuple[int, str]] = []
    layer = 0
    for span in graph.chain:
        starts.append((layer, span.kind))
        layer += span.count
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


def _owner(graph: Graph, starts: list[tuple[int, str]], tied: Parameter) -> int:
    for layer, kind in starts:
        for parameter in graph.kinds[kind].parameters:
            if (
                parameter.tied_to is None
                and parameter.shape == tied.shape
                and f".{tied.tied_to}".endswith(f".{parameter.name}")
            ):
                return layer
    raise ValueError(f"`{tied.name}` is tied to `{tied.tied_to}`, which no layer of the graph owns")
