"""The request's key `recompute_layers`: one number for all pipeline stages, or one for each."""

from windlass.program import recomputable_layers, with_recompute
from windlass.schema import Plan

RecomputeLayers = int | tuple[int, ...]
"""Recomputed layers of every stage, or of each pipeline stage in turn."""


def with_recompute_layers(plan: Plan, layers: RecomputeLayers) -> Plan:
    """The plan with this many layers of each stage recomputed, in the plan's own mode.

    Args:
        plan: a plan whose stages all recompute in one mode.
        layers: as in a request; a stage with virtual stages recomputes as many of each.
    """
    chunks = len(plan.stages)
    each = (layers,) if isinstance(layers, int) else layers
    counts = tuple(each[chunk % len(each)] for chunk in range(chunks))
    if plan.recompute == "selective":
        return with_recompute(plan, (0,) * chunks, counts)
    return with_recompute(plan, counts)


def recompute_layers(plan: Plan) -> RecomputeLayers | None:
    """A plan's recomputed layers as a request names them; None if all that can be, or none, are.

    A number stands for all stages if it gives the same plan.
    """
    if len({(stage.recompute, stage.recompute_layers) for stage in plan.stages}) == 1:
        return plan.stages[0].recompute_layers
    if with_recompute_layers(plan, plan.stages[-1].end_layer).stages == plan.stages:
        return None
    counts = tuple(_stage_count(plan, stage) for stage in range(plan.parallel.pipeline))
    most = max(counts)
    return most if with_recompute_layers(plan, most).stages == plan.stages else counts


def show_recompute_layers(layers: RecomputeLayers | None) -> str:
    """The value as an override writes it, `5` or `[5,3,0]`; `all` for None."""
    if isinstance(layers, tuple):
        return f"[{','.join(map(str, layers))}]"
    return "all" if layers is None else str(layers)


def _stage_count(plan: Plan, stage: int) -> int:
    """Most layers that a model chunk of a pipeline stage recomputes."""
    return max(
        0
        if chunk.recompute == "none"
        else chunk.recompute_layers or len(recomputable_layers(plan, chunk))
        for chunk in plan.stages[stage :: plan.parallel.pipeline]
    )
