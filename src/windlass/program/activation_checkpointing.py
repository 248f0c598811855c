"""Recompute: what of each layer is run again for its backward pass: nothing, most ops, or all."""

from collections.abc import Sequence

from windlass.schema.plan import Plan, Recompute, Stage


def recomputed(plan: Plan, layer: int) -> bool:
    """Whether a layer keeps only its input and runs its forward again before its backward."""
    return mode(plan, layer) == "full"


def selected(plan: Plan) -> frozenset[int]:
    """The layers that keep what their large products give and run the rest again."""
    found: list[int] = []
    for stage in plan.stages:
        if stage.recompute == "selective":
            found += able(plan, stage)[: stage.recompute_layers]
        elif stage.recompute_rest:
            found += able(plan, stage)[stage.recompute_layers :]
    return frozenset(found)


def mode(plan: Plan, layer: int) -> Recompute:
    """How a layer is recomputed.

    Where weights go away between the passes every layer runs again that has to come back, for what
    it kept would hold on to its weights. Of the others the plan decides, where they are `able`.
    """
    stage = next(stage for stage in plan.stages if stage.first <= layer < stage.last)
    if plan.is_offloaded("parameters") and layer < stage.phases[-1][0]:
        return "full"
    layers = able(plan, stage)
    if layer not in layers:
        return "none"
    return (
        stage.recompute
        if layer in layers[: stage.recompute_layers]
        else stage.recompute_rest or "none"
    )


def able(plan: Plan, stage: Stage) -> range:
    """The layers of a stage, or of one of its chunks, of which the plan decides.

    Never the head, whose backward follows its forward at once, nor the embedding, which keeps
    nothing that its tokens do not already hold. Where weights go away between the passes those of
    the last phase, whose weights stay until its backward; but none of the chain's last phase,
    whose backward follows at once.
    """
    layers = plan.stages[-1].last
    begin, end = max(1, stage.first), min(stage.last, layers - 1)
    if plan.is_offloaded("parameters"):
        begin = max(begin, stage.phases[-1][0])
        end = begin if stage.last == layers else end
    return range(begin, max(begin, end))


def recomputing(plan: Plan, whole: Sequence[int], selective: Sequence[int] | None = None) -> Plan:
    """The plan with the first so many layers of each of its stages recomputed.

    Args:
        plan: any.
        whole: for each of `plan.stages` how many run again; of more than can, all do.
        selective: for each how many do so but for their large products. Where others run again
            whole, all that are left do if any does. None: none do.
    """
    parts = zip(plan.stages, whole, selective or [0] * len(plan.stages), strict=True)
    stages = tuple(
        _recomputing(stage, again, most_ops, len(able(plan, stage)))
        for stage, again, most_ops in parts
    )
    return plan.model_copy(update={"stages": stages})


def _recomputing(stage: Stage, whole: int, selective: int, most: int) -> Stage:
    """A stage of so many layers of which the plan decides, told in the shortest way."""
    whole, selective = min(whole, most), min(selective, most)
    how: Recompute = "full" if whole else "selective" if selective else "none"
    count = whole or selective
    return Stage.model_construct(
        phases=stage.phases,
        recompute=how,
        recompute_layers=count if 0 < count < most else None,
        recompute_rest="selective" if selective and 0 < whole < most else None,
    )


def recompute_words(plan: Plan) -> str:
    """What is computed twice: `recomputes the first 5 layers`."""
    if plan.recompute == "none":
        return "keeps all activations"
    told = [
        f"{words} {_layers(plan, how)}"
        for how, words in (("full", "recomputes"), ("selective", "all but large products of"))
        if any(how in (stage.recompute, stage.recompute_rest) for stage in plan.stages)
    ]
    if plan.recompute == "selective":
        return f"recomputes {told[0]}"
    return " and ".join(told)


def _layers(plan: Plan, how: str) -> str:
    """`the first 5 layers`, of several stages `the first 0 to 5 layers of each stage`."""
    if all(stage.recompute == how and stage.recompute_layers is None for stage in plan.stages):
        return "all layers" if how == "selective" else "layers"
    if plan.recompute != how:
        return "the others"
    counts = [_count(stage, how) for stage in plan.stages]
    least, most = min(counts), max(counts)
    told = f"{least} to {most}" if least < most else f"{most}"
    of = "" if len(counts) == 1 else " of each stage"
    return f"the first {told} layer{'s' if most > 1 else ''}{of}"


def _count(stage: Stage, how: str) -> int:
    """How many layers of a stage are recomputed so at most."""
    if stage.recompute != how:
        return 0
    return stage.recompute_layers or stage.last - stage.first
