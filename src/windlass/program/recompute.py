"""Recompute: which layers keep only their input and run forward again before their backward."""

from collections.abc import Sequence

from windlass.spec.graph import Graph
from windlass.spec.plan import Plan, Stage


def recomputed(plan: Plan, graph: Graph, layer: int) -> bool:
    """Whether a layer keeps only its input and runs its forward again before its backward.

    Where weights go away between the passes every layer does that has to come back, for what it
    kept would hold on to its weights. Of the others the plan decides, where they are `able`.
    """
    stage = next(stage for stage in plan.stages if stage.first <= layer < stage.last)
    if plan.far("weights") and layer < stage.phases[-1][0]:
        return True
    return stage.recompute == "layer" and layer in able(plan, graph, stage)[: stage.recomputed]


def able(plan: Plan, graph: Graph, stage: Stage) -> range:
    """The layers of a stage, or of one of its chunks, of which the plan decides.

    Never the head, whose backward follows its forward at once, nor the embedding, which keeps
    nothing that its tokens do not already hold. Where weights go away between the passes those of
    the last phase, whose weights stay until its backward; but none of the chain's last phase,
    whose backward follows at once.
    """
    begin, end = max(1, stage.first), min(stage.last, graph.layers - 1)
    if plan.far("weights"):
        begin = max(begin, stage.phases[-1][0])
        end = begin if stage.last == graph.layers else end
    return range(begin, max(begin, end))


def recomputing(plan: Plan, graph: Graph, counts: Sequence[int]) -> Plan:
    """The plan with the first so many layers of each of its stages run again.

    Args:
        plan: any.
        graph: that it cuts.
        counts: one for each of `plan.stages`; of more than can, all do.
    """
    stages = tuple(
        _recomputing(stage, count, len(able(plan, graph, stage)))
        for stage, count in zip(plan.stages, counts, strict=True)
    )
    return plan.model_copy(update={"stages": stages})


def _recomputing(stage: Stage, count: int, most: int) -> Stage:
    """A stage whose first layers run again, told in the shortest way."""
    return Stage.model_construct(
        phases=stage.phases,
        recompute="layer" if min(count, most) else "none",
        recomputed=count if 0 < count < most else None,
    )


def recompute_words(plan: Plan) -> str:
    """What is computed twice: `recomputes the first 5 layers`."""
    if plan.recompute == "none":
        return "keeps all activations"
    if all(stage.recompute == "layer" and stage.recomputed is None for stage in plan.stages):
        return "recomputes layers"
    counts = [_count(stage) for stage in plan.stages]
    least, most = min(counts), max(counts)
    told = f"{least} to {most}" if least < most else f"{most}"
    of = "" if len(counts) == 1 else " of each stage"
    return f"recomputes the first {told} layer{'s' if most > 1 else ''}{of}"


def _count(stage: Stage) -> int:
    """How many layers of a stage run again at most."""
    if stage.recompute == "none":
        return 0
    return stage.recomputed or stage.last - stage.first
