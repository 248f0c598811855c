"""Checks a plan against a graph and a machine: reports every error at once, each with a way out."""

from collections import Counter
from collections.abc import Iterator

from windlass.errors import InputErrors
from windlass.program.layer_mode_errors import (
    float8_errors,
    fused_loss_errors,
    master_weight_errors,
    moment_errors,
    offloaded_optimizer_errors,
    recompute_errors,
    sparse_state_errors,
    step_graph_errors,
)
from windlass.program.replicas.context_parallel import context_errors, context_run_errors
from windlass.program.replicas.expert_parallel import expert_errors
from windlass.program.replicas.zero_sharding import updates_per_shard
from windlass.program.stack_capabilities import capability_faults
from windlass.program.tied_weights import tied_across_stages
from windlass.schema import (
    DEVICE_TIER,
    OWN_STACK,
    Graph,
    Machine,
    Plan,
    grid_columns,
    grid_rows,
)


def plan_errors(
    plan: Plan, graph: Graph, machine: Machine, *, global_batch: int | None = None
) -> tuple[str, ...]:
    """All errors of running `plan` for `graph` on `machine`; empty if the plan is valid.

    Args:
        global_batch: sequences per step that the request asks for; None means any number.
    """
    return (
        *_label_errors(plan, graph, machine),
        *_size_errors(plan, graph, machine, global_batch),
        *_lowering_errors(plan, graph),
        *_runtime_errors(plan),
        *_context_errors(plan, graph, machine),
        *(step_graph_errors(plan, graph, machine) if plan.step_graph else ()),
        *_float8_errors(plan, machine),
        *capability_faults(plan, machine.stack or OWN_STACK),
    )


def _context_errors(plan: Plan, graph: Graph, machine: Machine) -> Iterator[str]:
    """What the layers of our own runtime do not run beside context parallelism."""
    if machine.stack is not None and machine.stack.engine is None:
        return
    degree, tensor = plan.parallel.context or 1, plan.parallel.tensor
    yield from context_run_errors(degree, graph, tensor, plan.batch.sequence)


def _float8_errors(plan: Plan, machine: Machine) -> Iterator[str]:
    if plan.multiplies_float8 and machine.stack is None:
        yield from float8_errors(plan.parallel.tensor, plan.model)


def require_valid_plan(
    plan: Plan, graph: Graph, machine: Machine, *, global_batch: int | None = None
) -> None:
    """Refuses a plan that is not valid.

    Raises:
        InputErrors: all errors of the plan.
    """
    _raise_any(plan_errors(plan, graph, machine, global_batch=global_batch))


def require_lowerable(plan: Plan, graph: Graph) -> None:
    """Refuses a plan that cannot be lowered, whatever the machine.

    Raises:
        InputErrors: all errors of the plan.
    """
    _raise_any(tuple(_lowering_errors(plan, graph)))


def tensor_parallel_errors(degree: int, sequence: int, graph: Graph) -> Iterator[str]:
    """Why a graph's layers cannot be split over a tensor-parallel degree or grid.

    Between layers each rank holds its own tokens (sequence parallelism), inside them whole heads
    and features. Ranks may share the tokens of an image, of which there are always as many,
    unequally.
    """
    if degree == 1:
        return
    rows = grid_rows(degree)
    if sequence % rows and graph.examples is None:
        which = f"the {rows} rows of " if grid_columns(degree) > 1 else ""
        yield (
            f"`batch.sequence` = {sequence} is not a multiple of {which}`parallel.tensor` = "
            f"{degree}: between layers each tensor-parallel rank holds an equal part of the "
            "tokens; make it one or lower the degree"
        )
    if degree in graph.unshardable:
        yield from (f"`parallel.tensor` = {degree}: {why}" for why in graph.unshardable[degree])
    elif degree not in graph.tensor_shards:
        known = " or ".join(map(str, sorted((1, *graph.tensor_shards))))
        yield (
            f"`parallel.tensor` = {degree}, but `{graph.name}` was not captured for this degree; "
            f"capture it so, or set it to {known}"
        )


def _raise_any(messages: tuple[str, ...]) -> None:
    if messages:
        raise InputErrors(messages)


def _label_errors(plan: Plan, graph: Graph, machine: Machine) -> Iterator[str]:
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


def _size_errors(
    plan: Plan, graph: Graph, machine: Machine, global_batch: int | None
) -> Iterator[str]:
    parallel, batch = plan.parallel, plan.batch
    if parallel.devices > machine.devices:
        degrees = (
            parallel.pipeline,
            parallel.tensor,
            parallel.data,
            *filter(None, [parallel.context]),
        )
        yield (
            f"`parallel` takes {' x '.join(map(str, degrees))} = "
            f"{parallel.devices} devices, but `{machine.name}` has {machine.devices}; lower a "
            "degree"
        )
    if global_batch is not None and plan.global_batch != global_batch:
        yield (
            f"`batch.micro` x `batch.accumulation` x `parallel.data` = {batch.micro} x "
            f"{batch.accumulation} x {parallel.data} = {plan.global_batch}, but `train.batch` is "
            f"{global_batch}; make them equal"
        )
    if graph.max_sequence is not None and batch.sequence > graph.max_sequence:
        yield (
            f"`batch.sequence` = {batch.sequence}, but `{graph.name}` takes at most "
            f"{graph.max_sequence} tokens; shorten it or raise `model.sequence`"
        )
    examples = graph.examples
    if examples is not None and batch.sequence != examples.positions:
        yield (
            f"`batch.sequence` = {batch.sequence}, but an example of `{graph.name}` has "
            f"{examples.positions}; set it so"
        )
    if not machine.device.computes_in(plan.precision):
        yield (
            f"`precision` = {plan.precision}, but `{machine.name}` states no rate for it; "
            "choose one that it states"
        )
    if plan.precision == "float16" and not plan.clip:
        yield (
            "`precision` = float16 with `clip` = false: without the norm of all gradients nobody "
            "sees an overflow in time; set `clip` = true (`train.clip` = inf still clips nothing)"
        )
    tiers = [tier.name for tier in machine.device.tiers]
    for name, tier in plan.offload:
        if tier not in tiers:
            yield f"`offload.{name}` = {tier!r}, but `{machine.name}` has only {', '.join(tiers)}"


def _lowering_errors(plan: Plan, graph: Graph) -> Iterator[str]:
    yield from _coverage_errors(plan, graph)
    yield from _sharding_errors(plan)
    yield from schedule_errors(plan)
    yield from _offload_errors(plan)
    yield from _phase_errors(plan)
    yield from recompute_errors(plan, graph)
    yield from tensor_parallel_errors(plan.parallel.tensor, plan.batch.sequence, graph)
    if plan.loss:
        yield from fused_loss_errors(plan.parallel.tensor, graph)
    yield from expert_errors(plan, graph)
    yield from _tied_weight_errors(plan, graph)


def _runtime_errors(plan: Plan) -> Iterator[str]:
    """Plans that can be lowered and predicted, but that the runtime cannot run yet."""
    sharding, offload = plan.sharding, plan.offload
    if updates_per_shard(plan) > 1 and plan.is_offloaded("parameters"):
        yield (
            f"`sharding.optimizer` = {sharding.optimizer} with `offload.parameters` = "
            f"{offload.parameters} and `sharding.parameters` = {sharding.parameters}: this version "
            "runs offloaded sharded parameters only if both degrees are equal; make them equal, or "
            f"set `offload.parameters` = {DEVICE_TIER}"
        )
    offloads_both = plan.is_offloaded("parameters") and plan.is_offloaded("optimizer")
    if offloads_both and not plan.has_master_weights and offload.parameters != offload.optimizer:
        yield (
            f"`offload.parameters` = {offload.parameters} but `offload.optimizer` = "
            f"{offload.optimizer}: in {plan.precision} the weights are the master weights, which "
            "are stored with the moments; name one tier for both, or set `precision` = bfloat16"
        )


def _coverage_errors(plan: Plan, graph: Graph) -> Iterator[str]:
    end = plan.stages[-1].end_layer
    if end != graph.layers:
        yield (
            f"the stages cover layers [0, {end}), but `{graph.name}` has {graph.layers} layers; "
            "let the last phase end there"
        )


def _offload_errors(plan: Plan) -> Iterator[str]:
    """Which classes of tensors may be offloaded together."""
    if plan.precision == "float64" and plan.offloads:
        yield (
            "`precision` = float64 with an `offload` tier: it is for verification in device "
            "memory; set `precision` = float32, in which phases change no bit"
        )
    if plan.precision == "float64" and plan.moments != "float32":
        yield f"`precision` = float64 with `moments` = {plan.moments}; set `moments` = float32"
    yield from moment_errors(plan.optimizer or "adamw", plan.moments)
    is_sparse = plan.model is not None and plan.model.sparsity is not None
    yield from sparse_state_errors(plan.optimizer or "adamw", sparse=is_sparse)
    if plan.master_weights is False:
        yield from master_weight_errors(plan.optimizer or "adamw", plan.precision)
    if plan.is_offloaded("optimizer"):
        parts = plan.sharding.optimizer * int(plan.parallel.tensor)
        yield from offloaded_optimizer_errors(plan.optimizer or "adamw", parts)
    parameters, gradients = plan.offload.parameters, plan.offload.gradients
    if plan.is_offloaded("parameters") and not plan.is_offloaded("optimizer"):
        yield (
            f"`offload.parameters` = {parameters} but `offload.optimizer` = {DEVICE_TIER}: "
            "offloaded parameters are updated while their optimizer state is transferred; set "
            f"`offload.optimizer` = {parameters}"
        )
    if plan.is_offloaded("parameters") and not plan.is_offloaded("gradients"):
        yield (
            f"`offload.parameters` = {parameters} but `offload.gradients` = {DEVICE_TIER}: "
            "gradients of offloaded parameters must be offloaded too; set `offload.gradients` = "
            f"{parameters}"
        )
    if plan.is_offloaded("gradients") and not plan.is_offloaded("parameters"):
        yield (
            f"`offload.gradients` = {gradients} but `offload.parameters` = {DEVICE_TIER}: only "
            "gradients of offloaded parameters are offloaded; set `offload.parameters` and "
            f"`offload.optimizer` = {gradients}, or `offload.gradients` = {DEVICE_TIER}"
        )


def _phase_errors(plan: Plan) -> Iterator[str]:
    """Parameters are offloaded if and only if layers are in 2 or more phases."""
    parameters = plan.offload.parameters
    if plan.is_offloaded("parameters") and plan.phase_count == 1:
        stages = "stages.0" if len(plan.stages) == 1 else "stages.*"
        yield (
            f"`offload.parameters` = {parameters} but `{stages}.phases` = 1: with all layers in "
            "one phase no parameters would ever be offloaded; split the layers into at least 2 "
            "phases"
        )
    if not plan.is_offloaded("parameters"):
        for index, stage in enumerate(plan.stages):
            if len(stage.phases) > 1:
                yield (
                    f"`stages.{index}.phases` = {len(stage.phases)} but `offload.parameters` = "
                    f"{DEVICE_TIER}: only offloaded parameters need phases; offload them, or put "
                    "all layers into 1 phase"
                )


def _sharding_errors(plan: Plan) -> Iterator[str]:
    """Rts must divide rts', and rts' the replicas: a device updates a part of what it stores."""
    parameters, optimizer = plan.sharding.parameters, plan.sharding.optimizer
    if optimizer % parameters:
        yield (
            f"`sharding.parameters` = {parameters} does not divide `sharding.optimizer` = "
            f"{optimizer}: a device updates a part of the parameters that it stores; make "
            "`sharding.optimizer` a multiple of `sharding.parameters`"
        )
    if plan.parallel.replicas % optimizer:
        times = " x `parallel.context`" if plan.parallel.context else ""
        yield (
            f"`sharding.optimizer` = {optimizer} does not divide `parallel.data`{times} = "
            f"{plan.parallel.replicas}; choose a divisor"
        )
    if plan.sharding.reshard and parameters == 1:
        yield (
            "`sharding.reshard` = true with `sharding.parameters` = 1, which gathers nothing; "
            "raise `sharding.parameters` or leave `sharding.reshard` out"
        )
    yield from context_errors(plan.parallel.context or 1, plan.batch.sequence)


def schedule_errors(plan: Plan) -> Iterator[str]:
    """Pipeline schedules that do not go with a plan's model chunks, micro-batches or phases."""
    parallel, micro_batches = plan.parallel, plan.batch.accumulation
    stages, chunks, schedule = parallel.pipeline, parallel.virtual_stages, parallel.schedule
    if schedule == "interleaved":
        if chunks == 1 or stages == 1:
            yield (
                f"`parallel.schedule` = interleaved with `parallel.virtual_stages` = {chunks} and "
                f"`parallel.pipeline` = {stages}: model chunks take turns only if there are 2 or "
                "more of each; raise them or set `parallel.schedule` = 1f1b"
            )
        if micro_batches % stages and not plan.is_offloaded("parameters"):
            yield (
                f"`parallel.schedule` = interleaved with `batch.accumulation` = {micro_batches}, "
                f"which is not a multiple of `parallel.pipeline` = {stages}; make it one"
            )
    elif chunks > 1:
        yield (
            f"`parallel.virtual_stages` = {chunks} with `parallel.schedule` = {schedule}, which "
            "runs a stage as one model chunk; set `parallel.schedule` = interleaved or "
            "`parallel.virtual_stages` = 1"
        )
    if schedule == "zero-bubble" and plan.compile:
        yield (
            "`parallel.schedule` = zero-bubble with `compile`: the backward pass of a compiled "
            "layer cannot be split; set `compile` = false, or `parallel.schedule` = 1f1b"
        )
    if plan.is_offloaded("parameters") and schedule == "zero-bubble":
        yield (
            f"`parallel.schedule` = zero-bubble with `offload.parameters` = "
            f"{plan.offload.parameters}: phases have a schedule of their own, in which all "
            "micro-batches run through one phase; set `parallel.schedule` = 1f1b"
        )


def _tied_weight_errors(plan: Plan, graph: Graph) -> Iterator[str]:
    """User layers with several remote owners: messages are named by the user layer."""
    if plan.parallel.pipeline == 1 or plan.stages[-1].end_layer != graph.layers:
        return
    if plan.parallel.tensor > 1 and plan.parallel.tensor not in graph.tensor_shards:
        return  # `tensor_parallel_errors` reports it
    owner_counts = Counter(
        (tied.user_layer, tied.user_stage) for tied in tied_across_stages(plan, graph)
    )
    for (layer, stage), owners in owner_counts.items():
        if owners > 1:
            yield (
                f"layer {layer} on stage {stage} uses weights of {owners} layers on other stages; "
                "divide the stages so that all but one of them are on the same stage"
            )
