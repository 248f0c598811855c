"""Activation checkpointing: which layers recompute nothing, most ops or all in their backward."""

from bisect import bisect_right
from collections.abc import Sequence
from operator import attrgetter

from windlass.schema import Plan, Recompute, Stage


def is_recomputed(plan: Plan, layer: int) -> bool:
    """Whether a layer saves only its input and runs its full forward again before its backward."""
    return recompute_mode(plan, layer) == "full"


def selective_layers(plan: Plan) -> frozenset[int]:
    """The layers that save the outputs of large matrix products and recompute the rest."""
    layers: list[int] = []
    for stage in plan.stages:
        if stage.recompute == "selective":
            layers += recomputable_layers(plan, stage)[: stage.recompute_layers]
        elif stage.recompute_rest:
            layers += recomputable_layers(plan, stage)[stage.recompute_layers :]
    return frozenset(layers)


def recompute_mode(plan: Plan, layer: int) -> Recompute:
    """How a layer is recomputed.

    Where weights are offloaded between the passes, every layer outside a stage's last phase is
    fully recomputed: its saved activations would keep its weights in memory. For the other layers
    the plan decides, as far as they are `recomputable_layers`.
    """
    stage = plan.stages[bisect_right(plan.stages, layer, key=attrgetter("first_layer")) - 1]
    if plan.is_offloaded("parameters") and layer < last_phase_begin(plan, stage):
        return "full"
    layers = recomputable_layers(plan, stage)
    if layer not in layers:
        return "none"
    if layer in layers[: stage.recompute_layers]:
        return stage.recompute
    return stage.recompute_rest or "none"


def last_phase_begin(plan: Plan, stage: Stage) -> int:
    """The first layer of a stage's last phase, or the end of a model chunk that is not its last."""
    is_last_chunk = stage.first_layer >= plan.stages[-plan.parallel.pipeline].first_layer
    return stage.phases[-1][0] if is_last_chunk else stage.end_layer


def recomputable_layers(plan: Plan, stage: Stage) -> range:
    """The layers of a stage, or of one of its model chunks, whose recomputation the plan decides.

    The head is never among them, because its backward follows its forward at once, nor is the
    embedding, which saves nothing but its tokens. Where weights are offloaded between the passes
    these are the layers of the stage's last phase, whose weights stay until its backward; but none
    of the model's last phase, whose backward follows at once.
    """
    layers = plan.stages[-1].end_layer
    begin, end = max(1, stage.first_layer), min(stage.end_layer, layers - 1)
    if plan.is_offloaded("parameters"):
        begin = max(begin, last_phase_begin(plan, stage))
        end = begin if stage.end_layer == layers else end
    return range(begin, max(begin, end))


def fully_recomputed(plan: Plan, stage: Stage) -> range:
    """The `recomputable_layers` of a stage that the plan recomputes fully."""
    layers = recomputable_layers(plan, stage)
    return layers[: stage.recompute_layers] if stage.recompute == "full" else layers[:0]


def with_recompute(plan: Plan, full: Sequence[int], selective: Sequence[int] | None = None) -> Plan:
    """The plan with the first layers of each of its stages recomputed.

    Args:
        full: number of fully recomputed layers, [stage]; more than possible means all.
        selective: number of selectively recomputed layers, [stage]. In a stage that also has fully
            recomputed layers, any number above 0 means all the rest. None means none.
    """
    counts = zip(plan.stages, full, selective or [0] * len(plan.stages), strict=True)
    stages = tuple(
        _stage_with_recompute(
            stage, full_count, selective_count, len(recomputable_layers(plan, stage))
        )
        for stage, full_count, selective_count in counts
    )
    return plan.model_copy(update={"stages": stages})


def _stage_with_recompute(stage: Stage, full: int, selective: int, possible: int) -> Stage:
    """The stage with so many of its `possible` layers recomputed, in the shortest notation."""
    full, selective = min(full, possible), min(selective, possible)
    mode: Recompute = "full" if full else "selective" if selective else "none"
    count = full or selective
    return Stage.model_construct(
        phases=stage.phases,
        recompute=mode,
        recompute_layers=count if 0 < count < possible else None,
        recompute_rest="selective" if selective and 0 < full < possible else None,
    )


def describe_recompute(plan: Plan) -> str:
    """The plan's recomputation in words, such as `recomputes the first 5 layers`."""
    if plan.recompute == "none":
        return "keeps all activations"
    parts = [
        f"{words} {_describe_layers(plan, mode)}"
        for mode, words in (
            ("full", "recomputes"),
            ("selective", "all but the large matrix products of"),
        )
        if any(mode in (stage.recompute, stage.recompute_rest) for stage in plan.stages)
    ]
    if plan.recompute == "selective":
        return f"recomputes {parts[0]}"
    return " and ".join(parts)


def _describe_layers(plan: Plan, mode: str) -> str:
    """`the first 5 layers`, or for several stages `the first 0 to 5 layers of each stage`."""
    if all(stage.recompute == mode and stage.recompute_layers is None for stage in plan.stages):
        return "all layers" if mode == "selective" else "layers"
    if plan.recompute != mode:
        return "the others"
    counts = [_max_count(stage, mode) for stage in plan.stages]
    least, most = min(counts), max(counts)
    number = f"{least} to {most}" if least < most else f"{most}"
    scope = "" if len(counts) == 1 else " of each stage"
    return f"the first {number} layer{'s' if most > 1 else ''}{scope}"


def _max_count(stage: Stage, mode: str) -> int:
    """Upper bound on the number of layers of a stage that are recomputed in this mode."""
    if stage.recompute != mode:
        return 0
    return stage.recompute_layers or stage.end_layer - stage.first_layer
