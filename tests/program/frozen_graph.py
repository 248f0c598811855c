"""Graphs whose first layers are frozen."""

from windlass.schema.graph import Graph, LayerKind, LayerRun


def frozen_graph(graph: Graph, front: int) -> Graph:
    """The graph with its first `front` layers frozen, and whatever is tied to their weights."""
    names = [name for run in graph.layer_runs for name in [run.kind] * run.count]
    owners = {
        p.tied_to.split(".")[0] for k in graph.kinds.values() for p in k.parameters if p.tied_to
    }
    tied = owners & set(names[:front])

    def frozen(kinds: dict[str, LayerKind]) -> dict[str, LayerKind]:
        """All kinds, frozen, beside those that are not."""

        def kind(name: str, *, front: bool) -> LayerKind:
            parameters = tuple(
                p.model_copy(update={"frozen": True})
                if front or (p.tied_to and p.tied_to.split(".")[0] in tied)
                else p
                for p in kinds[name].parameters
            )
            renamed = f"frozen {name}" if front else name
            return kinds[name].model_copy(update={"name": renamed, "parameters": parameters})

        both = [kind(name, front=front) for name in kinds for front in (False, True)]
        return {each.name: each for each in both}

    runs = [f"frozen {name}" if at < front else name for at, name in enumerate(names)]
    return graph.model_copy(
        update={
            "kinds": frozen(graph.kinds),
            "tensor_shards": {t: frozen(kinds) for t, kinds in graph.tensor_shards.items()},
            "layer_runs": tuple(LayerRun(kind=name, count=1) for name in runs),
        }
    )
