"""Options that a request leaves open: degrees, precisions, modes and micro-batches.

Plans of one stage are listed here. On a machine of several devices they may be tensor parallel.
"""

from collections.abc import Iterator
from itertools import product
from typing import TypeVar, get_args

from windlass.errors import InputErrors
from windlass.planner.recompute_layers import with_recompute_layers
from windlass.planner.space.pins import pin_faults, single_device_faults
from windlass.planner.space.tensor_degrees import open_tensor_degrees
from windlass.program import tensor_parallel_errors
from windlass.schema import (
    DEVICE_TIER,
    OWN_STACK,
    PRECISION_BYTES,
    Batch,
    Graph,
    Machine,
    MomentFormat,
    Offload,
    Parallelism,
    Plan,
    Precision,
    Recompute,
    ResolvedRequest,
    Stage,
    Tier,
)

_Value = TypeVar("_Value")

_RECOMPUTE_MODES: tuple[Recompute, ...] = ("none", "full")


def open_single_stage_plans(
    request: ResolvedRequest, graph: Graph, machine: Machine
) -> tuple[Plan, ...]:
    """Every plan of one stage and one replica that keeps the request's pins.

    Args:
        request: pins whatever it names; the rest is open.
        graph: captured from the request's model, sharded for `open_tensor_degrees`.
        machine: the machine of the plans.

    Raises:
        InputErrors: everything that the request asks for and that is impossible.
    """
    faults = (*single_device_faults(request), *single_stage_faults(request, graph, machine))
    if faults:
        raise InputErrors(faults)
    return open_plans(base_plan(request, graph, machine), request, graph, machine)


def base_plan(request: ResolvedRequest, graph: Graph, machine: Machine) -> Plan:
    """The plainest plan for one device, with what the request pins for all plans."""
    return Plan(
        graph=graph.label,
        machine=machine.label,
        parallel=Parallelism(schedule=request.parallel.schedule or "1f1b"),
        moments=request.moments,
        clip=request.train.clip is not None,
        offload=Offload(optimizer=request.offload.optimizer or DEVICE_TIER),
        batch=Batch(sequence=request.train.sequence, micro=request.train.batch),
        stages=(Stage(phases=((0, graph.layers),)),),
    )


def open_plans(
    first: Plan, request: ResolvedRequest, graph: Graph, machine: Machine
) -> tuple[Plan, ...]:
    """A plan in every precision, mode and micro-batch size that the request leaves open.

    Args:
        first: a plan whose micro-batch is all that one replica takes.
        request: pins whatever it names.
        graph: the graph that it partitions.
        machine: the machine that it is for.

    Raises:
        InputErrors: what the request pins is impossible.
    """
    faults = tuple(single_stage_faults(request, graph, machine))
    if faults:
        raise InputErrors(faults)
    choices = product(
        _tensor_degrees(request, graph, machine),
        _pinned_or(request.precision, precisions(machine)),
        _pinned_or(request.compile, (False, True)),
        open_recompute(request),
        _microbatch_sizes(request),
    )
    plans = (
        vary(
            first,
            tensor=tensor,
            precision=precision,
            compiled=compiled,
            recompute=recompute,
            micro=micro,
        )
        for tensor, precision, compiled, recompute, micro in choices
        if is_captured(graph, precision, compiled=compiled)
        # Compiled layers cannot recompute selectively.
        and not (compiled and request.compile is None and recompute == "selective")
    )
    if request.recompute_layers is None:
        return tuple(plans)
    return tuple(with_recompute_layers(plan, request.recompute_layers) for plan in plans)


def vary(
    plan: Plan,
    *,
    tensor: int | None = None,
    precision: Precision | None = None,
    compiled: bool | None = None,
    recompute: Recompute | None = None,
    micro: int | None = None,
    sequence: int | None = None,
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
    if sequence is not None:
        batch = batch.model_copy(update={"sequence": sequence})
    stages = plan.stages
    if recompute is not None:
        stages = tuple(stage.model_copy(update={"recompute": recompute}) for stage in stages)
    changes: dict[str, object] = {"batch": batch, "stages": stages}
    if tensor is not None:
        changes["parallel"] = plan.parallel.model_copy(update={"tensor": tensor})
    if precision is not None:
        changes["precision"] = precision
    if compiled is not None:
        changes["compile"] = compiled
    return plan.model_copy(update=changes)


def open_recompute(request: ResolvedRequest) -> tuple[Recompute, ...]:
    """Recompute modes that the request leaves open."""
    if request.recompute_layers is not None and request.recompute is None:
        return ("full",)
    return _pinned_or(request.recompute, _RECOMPUTE_MODES)


def precisions(machine: Machine) -> tuple[Precision, ...]:
    """Precisions that the machine states a rate for and its stack can run, float32 first."""
    stated = {rate.precision for rate in machine.device.matmul}
    can = (machine.stack or OWN_STACK).can.precisions
    return tuple(each for each in PRECISION_BYTES if each in stated and each in can)


def offload_tiers(machine: Machine) -> tuple[Tier, ...]:
    """Tiers that tensors can be offloaded to, nearest first; none if the stack cannot offload."""
    if machine.stack is not None and not machine.stack.can.offload:
        return ()
    return tuple(tier for tier in machine.device.tiers[1:] if tier.read and tier.write)


def smaller_moments(moments: MomentFormat) -> tuple[MomentFormat, ...]:
    """Formats of optimizer moments that take fewer bytes, the largest of them first."""
    formats: tuple[MomentFormat, ...] = get_args(MomentFormat)
    return formats[formats.index(moments) + 1 :]


def divisors(count: int) -> tuple[int, ...]:
    """All divisors, smallest first."""
    small = [size for size in range(1, int(count**0.5) + 1) if count % size == 0]
    return tuple(dict.fromkeys([*small, *(count // size for size in reversed(small))]))


def _pinned_or(pinned: _Value | None, choices: tuple[_Value, ...]) -> tuple[_Value, ...]:
    return choices if pinned is None else (pinned,)


def _tensor_degrees(request: ResolvedRequest, graph: Graph, machine: Machine) -> tuple[int, ...]:
    """Tensor-parallel degrees that keep the pin, or by which layers and tokens can be sharded."""
    sequence = request.train.sequence
    if request.parallel.tensor is not None:
        return (request.parallel.tensor,)
    divisible = (
        degree
        for degree in open_tensor_degrees(request, machine, graph.unshardable)
        if not any(tensor_parallel_errors(degree, sequence, graph))
    )
    return (1, *divisible)


def is_captured(graph: Graph, precision: Precision, *, compiled: bool) -> bool:
    """Whether every kind of layer was captured in this precision and mode."""
    captured_precision = "float32" if precision == "float64" else precision
    return all(
        any(
            cost.precision == captured_precision and cost.compiled == compiled
            for cost in kind.costs
        )
        for kind in graph.kinds.values()
    )


def _microbatch_sizes(request: ResolvedRequest) -> tuple[int, ...]:
    """Micro-batch sizes that divide the global batch and keep the pins."""
    batch = request.batch
    return tuple(
        micro
        for micro in divisors(request.train.batch)
        if batch.micro in (None, micro)
        and batch.accumulation in (None, request.train.batch // micro)
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
            f"choose {' or '.join(stated)}"
        )
    yield from pin_faults(request, machine)


def single_stage_faults(request: ResolvedRequest, graph: Graph, machine: Machine) -> Iterator[str]:
    """Faults of a request for one replica that no plan of one stage can meet."""
    degree = request.parallel.tensor or 1
    if degree <= machine.devices:
        yield from tensor_parallel_errors(degree, request.train.sequence, graph)
    if not _microbatch_sizes(request):
        batch, total = request.batch, request.train.batch
        asked = " and ".join(f"`batch.{name}` = {size}" for name, size in batch if size is not None)
        sizes = ", ".join(map(str, divisors(total)))
        yield (
            f"{asked} cannot make `train.batch` = {total}: micro-batch x accumulation must be "
            f"{total}, so a micro-batch is one of {sizes}"
        )
    yield from request_faults(request, graph, machine)
