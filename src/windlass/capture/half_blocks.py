"""Graph of a transformer whose blocks are cut in half, attention and feed-forward part.

PopART places both halves of a block on pipeline stages of their own.
"""

from windlass.schema import Graph, LayerCost, LayerKind, LayerRun, Polynomial

_ATTENTION_WEIGHTS = ("qkv", "projection", "norm")
"""What the attention half owns; the rest is the feed-forward part's."""


def split_blocks(graph: Graph) -> Graph:
    """The graph with two layers in place of each block, of a graph from `stack_graph`.

    Each half ends with its residual sum and norm. Both keep half of the bytes that a block keeps
    for a token; attention alone keeps scores.
    """
    return graph.model_copy(
        update={
            "layer_runs": tuple(half for run in graph.layer_runs for half in _runs(run)),
            "kinds": _kinds(graph.kinds),
            "tensor_shards": {
                degree: _kinds(kinds) for degree, kinds in graph.tensor_shards.items()
            },
        }
    )


def _runs(run: LayerRun) -> tuple[LayerRun, ...]:
    if run.kind != "block":
        return (run,)
    halves = LayerRun(kind="attention", count=1), LayerRun(kind="feed_forward", count=1)
    return halves * run.count


def _kinds(kinds: dict[str, LayerKind]) -> dict[str, LayerKind]:
    block = kinds["block"]
    halves = _half(block, attention=True), _half(block, attention=False)
    others = {name: kind for name, kind in kinds.items() if name != "block"}
    return others | {half.name: half for half in halves}


def _half(block: LayerKind, *, attention: bool) -> LayerKind:
    return LayerKind(
        name="attention" if attention else "feed_forward",
        is_hidden=True,
        parameters=tuple(
            each
            for each in block.parameters
            if (each.name.split(".")[0] in _ATTENTION_WEIGHTS) == attention
        ),
        costs=tuple(_half_cost(cost, attention=attention) for cost in block.costs),
    )


def _half_cost(cost: LayerCost, *, attention: bool) -> LayerCost:
    """The half of a block's cost: a forward pass begins with attention, a backward pass ends so."""
    sums = [place for place, op in enumerate(cost.forward) if op.name == "residual"]
    middle = sums[0] + 1
    gradients = [place for place, op in enumerate(cost.backward) if op.name == "residual"]
    turn = gradients[1]
    saved = cost.saved_bytes
    kept = Polynomial(bs=saved.bs / 2, bss=saved.bss if attention else 0.0)
    return cost.model_copy(
        update={
            "forward": cost.forward[:middle] if attention else cost.forward[middle:],
            "backward": cost.backward[turn:] if attention else cost.backward[:turn],
            "saved_bytes": kept,
        }
    )
