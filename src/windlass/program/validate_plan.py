"""Which plans are legal for a graph and a machine: every fault at once, each with the way out."""

from collections import Counter
from collections.abc import Iterator

from windlass.errors import InputErrors
from windlass.program.activation_checkpointing import recomputable_layers, selective_layers
from windlass.program.tied_weights import tied_across_stages
from windlass.program.zero_sharding import updates_per_shard
from windlass.schema.graph import Graph
from windlass.schema.machine import Machine
from windlass.schema.plan import Plan
from windlass.schema.tensor_grid import grid_columns, grid_rows


def plan_errors(
    plan: Plan, graph: Graph, machine: Machine, *, global_batch: int | None = None
) -> tuple[str, ...]:
    """All that is wrong with running `plan` for `graph` on `machine`; nothing if it is legal.

    Args:
        plan: the plan.
        graph: what is to be computed.
        machine: what it is to run on.
        global_batch: sequences of a step that the request asks for; None asks for none.
    """
    return (*_labels(plan, graph, machine), *_sizes(plan, graph, machine, global_batch),
            *_lowerable(plan, graph), *_unrun(plan))  # fmt: skip


def require_valid_plan(
    plan: Plan, graph: Graph, machine: Machine, *, global_batch: int | None = None
) -> None:
    """Refuses a plan that is not legal.

    Raises:
        Faults: all that is wrong.
    """
    _raise(plan_errors(plan, graph, machine, global_batch=global_batch))


def require_lowerable(plan: Plan, graph: Graph) -> None:
    """Refuses a plan that cannot be lowered, whatever the machine.

    Raises:
        Faults: all that is wrong.
    """
    _raise(tuple(_lowerable(plan, graph)))


def tensor_parallel_errors(degree: int, sequence: int, graph: Graph) -> Iterator[str]:
    """Why a graph's layers cannot be cut over so many slices, or such a grid of them.

    Between layers each slice holds its own tokens, inside them whole heads and features.
    """
    if degree == 1:
        return
    rows = grid_rows(degree)
    if sequence % rows:
        of = f"the {rows} rows of " if grid_columns(degree) > 1 else ""
        yield (
            f"`batch.sequence` = {sequence} is no multiple of {of}`parallel.tensor` = {degree}: between "
            "layers each slice holds as many tokens; make it one or lower the degree"
        )
    if degree in graph.unshardable:
        yield from (f"`parallel.tensor` = {degree}: {why}" for why in graph.unshardable[degree])
    elif degree not in graph.tensor_shards:
        known = " or ".join(map(str, sorted((1, *graph.tensor_shards))))
        yield (
            f"`parallel.tensor` = {degree}, but `{graph.name}` was not captured in {degree} slices; "
            f"capture it so, or set it to {known}"
        )


def _raise(found: tuple[str, ...]) -> None:
    if found:
        raise InputErrors(found)


def _labels(plan: Plan, graph: Graph, machine: Machine) -> Iterator[str]:
    if plan.graph != graph.label:
        yield (
            f"the plan is for graph `{plan.graph}`, but this one is `{graph.label}`; "
            "plan again for this model"
        )
    if plan.machine != machine.label:
        yield (
            f"the plan is for machine `{plan.machine}`, but this one is `{machine.label}`; "
            "plan again for this machine"
        )


def _sizes(plan: Plan, graph: Graph, machine: Machine, global_batch: int | None) -> Iterator[str]:
    cut, batch = plan.parallel, plan.batch
    if cut.devices > machine.devices:
        yield (
            f"`parallel` takes {cut.pipeline} x {cut.tensor} x {cut.data} = {cut.devices} devices, "
            f"but `{machine.name}` has {machine.devices}; lower a degree"
        )
    if global_batch is not None and plan.global_batch != global_batch:
        yield (
            f"`batch.micro` x `batch.accumulation` x `parallel.data` = {batch.micro} x "
            f"{batch.accumulation} x {cut.data} = {plan.global_batch}, but `train.batch` is "
            f"{global_batch}; make them equal"
        )
    if graph.max_sequence is not None and batch.sequence > graph.max_sequence:
        yield (
            f"`batch.sequence` = {batch.sequence}, but `{graph.name}` takes at most "
            f"{graph.max_sequence} tokens; shorten it or raise `model.sequence`"
        )
    if not machine.device.computes_in(plan.precision):
        yield (
            f"`precision` = {plan.precision}, but `{machine.name}` states no rate for it; "
            "choose one that it states"
        )
    tiers = [tier.name for tier in machine.device.tiers]
    for name, tier in plan.offload:
        if tier not in tiers:
            yield f"`home.{name}` = {tier!r}, but `{machine.name}` has only {', '.join(tiers)}"


def _lowerable(plan: Plan, graph: Graph) -> Iterator[str]:
    yield from _uncovered(plan, graph)
    yield from _shards(plan)
    yield from schedule_errors(plan)
    yield from _homes(plan)
    yield from _recomputed(plan, graph)
    yield from tensor_parallel_errors(plan.parallel.tensor, plan.batch.sequence, graph)
    yield from _loans(plan, graph)


def _unrun(plan: Plan) -> Iterator[str]:
    """What can be lowered and predicted, but has no tensors yet."""
    sharding, home = plan.sharding, plan.offload
    if updates_per_shard(plan) > 1 and plan.is_offloaded("parameters"):
        yield (
            f"`sharding.optimizer` = {sharding.optimizer} with `offload.parameters` = {home.parameters} and "
            f"`sharding.parameters` = {sharding.parameters}: this version runs shards of weights away "
            "from the near tier only where both are equal; make them equal, or let weights stay "
            "near"
        )
    both = plan.is_offloaded("parameters") and plan.is_offloaded("optimizer")
    if both and not plan.has_master_weights and home.parameters != home.optimizer:
        yield (
            f"`offload.parameters` = {home.parameters} but `offload.optimizer` = {home.optimizer}: in "
            f"{plan.precision} the weights are the masters, which lie with the moments; name one "
            "tier for both, or set `precision` = bfloat16"
        )


def _uncovered(plan: Plan, graph: Graph) -> Iterator[str]:
    last = plan.stages[-1].end_layer
    if last != graph.layers:
        yield (
            f"the stages cover layers [0, {last}), but `{graph.name}` has {graph.layers} layers; "
            "let the last phase end there"
        )


def _homes(plan: Plan) -> Iterator[str]:
    """Which classes may have homes beyond the near tier together."""
    if plan.precision == "float64" and plan.offloads:
        yield (
            "`precision` = float64 with a `offload` that is not near: it is for proofs in memory; "
            "set `precision` to float32, in which phases change no bit"
        )
    if plan.precision == "float64" and plan.moments != "float32":
        yield (f"`precision` = float64 with `moments` = {plan.moments}; set `moments` to float32")
    weights, gradients = plan.offload.parameters, plan.offload.gradients
    phases = max(len(stage.phases) for stage in plan.stages)
    if plan.is_offloaded("parameters") and not plan.is_offloaded("optimizer"):
        yield (
            f"`offload.parameters` = {weights} but `offload.optimizer` = near: weights that are away are "
            f"updated as their optimizer state passes through; set `offload.optimizer` = {weights}"
        )
    if plan.is_offloaded("parameters") and not plan.is_offloaded("gradients"):
        yield (
            f"`offload.parameters` = {weights} but `offload.gradients` = near: gradients of weights that "
            f"are away leave the near tier too; set `offload.gradients` = {weights}"
        )
    if plan.is_offloaded("gradients") and not plan.is_offloaded("parameters"):
        yield (
            f"`offload.gradients` = {gradients} but `offload.parameters` = near: only gradients of weights "
            f"that go away leave; set `offload.parameters` and `offload.optimizer` = {gradients}, or "
            "`offload.gradients` = near"
        )
    if plan.is_offloaded("parameters") and phases == 1:
        stages = "stages.0" if len(plan.stages) == 1 else "stages.*"
        yield (
            f"`offload.parameters` = {weights} but `{stages}.phases` = 1: with all layers in one phase "
            "no weights would ever be away; cut the layers into at least 2 phases"
        )
    if not plan.is_offloaded("parameters"):
        for index, stage in enumerate(plan.stages):
            if len(stage.phases) > 1:
                yield (
                    f"`stages.{index}.phases` = {len(stage.phases)} but `offload.parameters` = near: "
                    "weights that never go away need no turns; give them another home, or put "
                    "all layers into 1 phase"
                )


def _recomputed(plan: Plan, graph: Graph) -> Iterator[str]:
    """A stage runs no more layers again than can, and most ops of one only where that can be."""
    for index, stage in enumerate(plan.stages):
        count = len(recomputable_layers(plan, stage))
        if stage.recompute_layers is not None and stage.recompute_layers > count:
            yield (
                f"`stages.{index}.recomputed` = {stage.recompute_layers}, but it has {count} layers "
                "that may run again by choice: neither the first nor the last of the chain does, "
                "and those of other phases than the last always do; lower it or leave it out"
            )
    if selective_layers(plan):
        yield from selective_recompute_errors(plan, graph)


def selective_recompute_errors(plan: Plan, graph: Graph) -> Iterator[str]:
    """Why no layer of a plan can keep what its large products give and run the rest again."""
    told = "`recompute` = selective with"
    if plan.compile:
        yield (
            f"{told} `compile`: a compiled layer already runs again what takes no time; set "
            "`compile` = false, or `recompute` = none or layer"
        )
    if plan.parallel.schedule == "zero-bubble":
        yield (
            f"{told} `parallel.schedule` = zero-bubble, whose backward passes come in two parts; set `parallel.schedule` "
            "= 1f1b, or `recompute` = none or layer"
        )
    if plan.parallel.tensor > 1 and plan.parallel.tensor not in graph.tensor_shards:
        return  # told with the slices
    kinds = graph.shard(plan.parallel.tensor).kinds
    within = {span.kind for span in graph.layer_runs} - {graph.layer_runs[0].kind, graph.layer_runs[-1].kind}
    if not all(kinds[name].selective_costs for name in within):
        yield (
            f"{told} `{graph.name}`, of whose layers some cannot be run so; set `recompute` = none "
            "or layer"
        )


def _shards(plan: Plan) -> Iterator[str]:
    """The degree rts divides rts', and rts' divides r: a device updates a part of what it holds."""
    weights, optimizer = plan.sharding.parameters, plan.sharding.optimizer
    if optimizer % weights:
        yield (
            f"`sharding.parameters` = {weights} does not divide `sharding.optimizer` = {optimizer}: a "
            "device updates a part of the weights that it holds; make one a multiple of the other"
        )
    if plan.parallel.data % optimizer:
        yield (
            f"`sharding.optimizer` = {optimizer} does not divide `parallel.data` = "
            f"{plan.parallel.data}; choose a divisor"
        )


def schedule_errors(plan: Plan) -> Iterator[str]:
    """Which orders go with chunks, micro-batches and phases."""
    stages, chunks, micros = (
        plan.parallel.pipeline,
        plan.parallel.virtual_stages,
        plan.batch.accumulation,
    )
    if plan.parallel.schedule == "interleaved":
        if chunks == 1 or stages == 1:
            yield (
                f"`parallel.schedule` = interleaved with `parallel.virtual_stages` = {chunks} and `parallel.pipeline` = "
                f"{stages}: chunks take turns only if there are 2 or more of each; raise them or "
                "set `parallel.schedule` = 1f1b"
            )
        if micros % stages:
            yield (
                f"`parallel.schedule` = interleaved with `batch.accumulation` = {micros}, which is no multiple "
                f"of `parallel.pipeline` = {stages}; make it one"
            )
    elif chunks > 1:
        yield (
            f"`parallel.virtual_stages` = {chunks} with `parallel.schedule` = {plan.parallel.schedule}, which runs a stage in one "
            "piece; set `parallel.schedule` = interleaved or `parallel.virtual_stages` = 1"
        )
    if plan.parallel.schedule == "zero-bubble" and plan.compile:
        yield (
            "`parallel.schedule` = zero-bubble with `compile`: a compiled layer's backward pass is one piece; "
            "set `compile` = false, or `parallel.schedule` = 1f1b"
        )
    if plan.is_offloaded("parameters") and plan.parallel.schedule in ("interleaved", "zero-bubble"):
        yield (
            f"`parallel.schedule` = {plan.parallel.schedule} with `offload.parameters` = {plan.offload.parameters}: phases have an "
            "order of their own, in which all micro-batches run through one; set `parallel.schedule` = 1f1b"
        )


def _loans(plan: Plan, graph: Graph) -> Iterator[str]:
    """A message of a loan goes by the layer that borrows, so that it may borrow from one only."""
    if plan.parallel.pipeline == 1 or plan.stages[-1].end_layer != graph.layers:
        return
    if plan.parallel.tensor > 1 and plan.parallel.tensor not in graph.tensor_shards:
        return  # told above
    names = Counter((loan.user_layer, loan.user_stage) for loan in tied_across_stages(plan, graph))
    for (layer, stage), lenders in names.items():
        if lenders > 1:
            yield (
                f"layer {layer} on stage {stage} uses weights of {lenders} layers on other stages; "
                "cut the stages so that all but one of them are on its own"
            )
