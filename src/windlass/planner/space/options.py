"""Single options of plans, plans that differ in them, and faults of what a request asks for."""

from collections.abc import Iterator
from typing import get_args

from windlass.planner.space.pins import context_faults, pin_faults, step_graph_faults
from windlass.program import fused_loss_errors, tensor_parallel_errors
from windlass.schema import (
    OWN_STACK,
    PRECISION_BYTES,
    Batch,
    Graph,
    Machine,
    MomentFormat,
    Plan,
    Precision,
    Recompute,
    ResolvedRequest,
    Tier,
    optimizer_law,
)


def vary(
    plan: Plan,
    *,
    precision: Precision | None = None,
    compiled: bool | None = None,
    recompute: Recompute | None = None,
    micro: int | None = None,
) -> Plan:
    """The plan with some choices changed; a new micro-batch size changes the accumulation with it.

    It is built without validation, because it changes a valid plan by valid values, and a search
    does so hundreds of times.
    """
    batch = plan.batch
    if micro is not None:
        batch = Batch.model_construct(
            sequence=batch.sequence, micro=micro, accumulation=batch.sequences_per_replica // micro
        )
    stages = plan.stages
    if recompute is not None:
        stages = tuple(stage.model_copy(update={"recompute": recompute}) for stage in stages)
    changes: dict[str, object] = {"batch": batch, "stages": stages}
    if precision is not None:
        changes["precision"] = precision
    if compiled is not None:
        changes["compile"] = compiled
    return plan.model_copy(update=changes)


def precisions(machine: Machine) -> tuple[Precision, ...]:
    """Precisions that the device computes in and its stack can run, float32 first."""
    can = (machine.stack or OWN_STACK).can.precisions
    able = (each for each in PRECISION_BYTES if each != "float64")  # it is for verification only
    return tuple(each for each in able if each in can and machine.device.computes_in(each))


def open_precisions(machine: Machine) -> tuple[Precision, ...]:
    """Precisions that are tried where a request names none.

    Only a request asks for TF32 and for formats that change what is learned; but float16, with its
    loss scale, takes the place of bfloat16 where the device or the stack has none.
    """
    able = precisions(machine)
    usual = ("float32", "bfloat16" if "bfloat16" in able else "float16")
    return tuple(each for each in able if each in usual)


def offload_tiers(machine: Machine) -> tuple[Tier, ...]:
    """Tiers that tensors can be offloaded to, nearest first; none if the stack cannot offload."""
    if machine.stack is not None and not machine.stack.can.offload:
        return ()
    return tuple(tier for tier in machine.device.tiers[1:] if tier.read and tier.write)


def smaller_moments(request: ResolvedRequest) -> tuple[MomentFormat, ...]:
    """Formats of the optimizer's moments that take fewer bytes, the largest of them first."""
    formats: tuple[MomentFormat, ...] = get_args(MomentFormat)
    smaller = formats[formats.index(request.moments) + 1 :]
    return smaller if optimizer_law(request.train.optimizer).quantizes_moments else ()


def divisors(count: int) -> tuple[int, ...]:
    """All divisors, smallest first."""
    small = [size for size in range(1, int(count**0.5) + 1) if count % size == 0]
    return tuple(dict.fromkeys([*small, *(count // size for size in reversed(small))]))


def is_captured(graph: Graph, precision: Precision, *, compiled: bool) -> bool:
    """Whether every kind of layer was captured in this precision and mode."""
    return all(
        any(cost.compiled == compiled for cost in kind.costs_for(precision))
        for kind in graph.kinds.values()
    )


def request_faults(request: ResolvedRequest, graph: Graph, machine: Machine) -> Iterator[str]:
    """Faults of a request that no plan can meet, whatever its parallelism."""
    longest, sequence = graph.max_sequence, request.train.sequence
    if longest is not None and sequence > longest:
        yield (
            f"`train.sequence` = {sequence}, but `{graph.name}` takes at most {longest} tokens; "
            "shorten it or raise `model.sequence`"
        )
    stated = precisions(machine)
    if request.precision is not None and not machine.device.computes_in(request.precision):
        yield (
            f"`precision` = {request.precision}, but `{machine.name}` states no rate for it; "
            f"choose {' or '.join(stated)}, or measure it by `windlass probe` if this is it"
        )
    if request.train.loss_scale is not None and request.precision != "float16":
        yield (
            f"`train.loss_scale` = {request.train.loss_scale:g} with `precision` = "
            f"{request.precision or 'open'}: only float16 scales the loss; leave it out, or set "
            "`precision` = float16"
        )
    if request.loss == "fused":
        yield from fused_loss_errors(request.parallel.tensor or 1, graph)
    phases = request.phases or 1
    if phases > graph.layers:
        yield (
            f"`phases` = {phases}, but `{graph.name}` has {graph.layers} layers; ask for "
            f"{graph.layers} at most"
        )
    if phases > 1 and not offload_tiers(machine):
        yield (
            f"`phases` = {phases}, but `{machine.name}` has no offload tier to hold the other "
            "phases; leave it out"
        )
    yield from step_graph_faults(request, graph, machine)
    yield from context_faults(request, graph, machine)
    yield from pin_faults(request, machine)


def single_stage_faults(request: ResolvedRequest, graph: Graph, machine: Machine) -> Iterator[str]:
    """Faults of a request for one replica that no plan of one stage can meet."""
    degree = request.parallel.tensor or 1
    if degree <= machine.devices:
        yield from tensor_parallel_errors(degree, request.train.sequence, graph)
    yield from batch_faults(request)
    yield from request_faults(request, graph, machine)


def batch_faults(request: ResolvedRequest, replicas: int = 1) -> Iterator[str]:
    """Why micro-batches cannot make what one of some replicas takes of the batch.

    Args:
        request: names a micro-batch size, an accumulation or neither.
        replicas: data-parallel degree, which divides the batch.
    """
    batch, total = request.batch, request.train.batch // replicas
    micro = batch.micro or total // (batch.accumulation or total)
    if micro * (batch.accumulation or total // micro) != total:
        asked = " and ".join(f"`batch.{name}` = {size}" for name, size in batch if size is not None)
        over = f" over `parallel.data` = {replicas}" if replicas > 1 else ""
        sizes = ", ".join(map(str, divisors(total)))
        yield (
            f"{asked} cannot make `train.batch` = {request.train.batch}{over}: micro-batch x "
            f"accumulation must be {total}, so a micro-batch is one of {sizes}"
        )
