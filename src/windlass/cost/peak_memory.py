"""Peak memory of each tier on the device where it is fullest.

The program says which tensors are alive while each instruction runs; the machine says what the
process holds before any tensor. Fragmentation adds nothing: `torch_ext.cpu_allocator` maps blocks
one by one, so that resident memory is the memory of live tensors.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import expm1

from windlass.cost.clock.stack_bytes import stack_stage_bytes
from windlass.program import (
    Program,
    lower_stage,
    memory_profile,
    mesh_coord,
    offloaded_bytes_by_tier,
)
from windlass.schema import (
    DEVIATIONS_OF_80_PERCENT,
    Graph,
    Machine,
    MemoryClass,
    OffloadClass,
    Plan,
    TierPeak,
)

_STEADY_MULTIPLE = 3
"""Micro-batches, in multiples of the stages, from which on no stage holds more."""
_SHORT_MICROBATCHES = 3
"""Micro-batches of a single stage with which it holds as much as with more."""

MEMORY_ERROR = 0.0175
"""Half the width of the 80 % interval of peak memory, as a share: what a process takes beside its
tensors depends on which code it has run. Of 17 plans of `windlass validate here`, seeds 0 and 101,
14 are inside (2026-11-22)."""


def stage_tier_peaks(
    plan: Plan, graph: Graph, machine: Machine, programs: Sequence[Program] = ()
) -> tuple[tuple[TierPeak, ...], ...]:
    """The peak of each tier, device memory first, on one device of each stage.

    Args:
        plan: the plan.
        graph: the graph that it partitions.
        machine: the machine that it runs on.
        programs: programs of at least one device of each stage; none means those of
            `steady_state_microbatches`, which need as much.
    """
    if machine.stack is not None:
        stages = stack_stage_bytes(plan, graph, machine)
        return tuple(tuple(_on_stack(each, machine)) for each in stages)
    programs = programs or stage_programs(plan, graph)
    by_stage = {mesh_coord(each.device, plan.parallel).stage: each for each in reversed(programs)}
    return tuple(
        tuple(_stage(by_stage[stage], plan, graph, machine, stage)) for stage in sorted(by_stage)
    )


def stage_programs(plan: Plan, graph: Graph) -> tuple[Program, ...]:
    """A program of each stage, of as few micro-batches as need as much memory as all."""
    short = steady_state_microbatches(plan)
    return tuple(lower_stage(short, graph, stage) for stage in range(plan.parallel.pipeline))


def _stage(
    program: Program, plan: Plan, graph: Graph, machine: Machine, stage: int
) -> Iterator[TierPeak]:
    process_bytes = machine.device.process_bytes(compiled=plan.compile)
    device_memory, *others = machine.device.tiers
    full = memory_profile(program, plan, graph, runtime_bytes=process_bytes)
    yield TierPeak(
        tier=device_memory.name,
        capacity_bytes=device_memory.capacity_bytes,
        peak_bytes=full.peak_bytes,
        by_class=full.by_class,
        error=MEMORY_ERROR,
    )
    offloaded = offloaded_bytes_by_tier(plan, graph, stage)
    for tier in others:
        by_class = offloaded.get(tier.name, {})
        yield TierPeak(
            tier=tier.name,
            capacity_bytes=tier.capacity_bytes,
            peak_bytes=sum(by_class.values()),
            by_class={_memory_class(name): nbytes for name, nbytes in by_class.items()},
        )


def _on_stack(by_class: Mapping[MemoryClass, float], machine: Machine) -> Iterator[TierPeak]:
    """The peak of a stage on another stack, whose instructions are not known; it offloads nothing.

    Raises:
        KeyError: the machine names no stack.
    """
    if machine.stack is None:
        raise KeyError(f"{machine.name} names no stack")
    memory, *others = machine.device.tiers
    deviation = machine.stack.memory_deviation
    yield TierPeak(
        tier=memory.name,
        capacity_bytes=memory.capacity_bytes,
        peak_bytes=round(sum(by_class.values())),
        by_class={name: round(nbytes) for name, nbytes in by_class.items()},
        error=MEMORY_ERROR if deviation is None else -expm1(-DEVIATIONS_OF_80_PERCENT * deviation),
    )
    for tier in others:
        yield TierPeak(
            tier=tier.name, capacity_bytes=tier.capacity_bytes, peak_bytes=0, by_class={},
            )  # fmt: skip


def steady_state_microbatches(plan: Plan) -> Plan:
    """The plan with no more micro-batches than fill its stages as far as they ever are."""
    if plan.parallel.schedule == "gpipe" and plan.parallel.pipeline > 1:
        return plan
    return shortened(
        plan,
        _SHORT_MICROBATCHES
        if plan.parallel.pipeline == 1
        else _STEADY_MULTIPLE * plan.parallel.pipeline,
    )


def shortened(plan: Plan, accumulation: int) -> Plan:
    """The plan with at most so many micro-batches, if later ones do what earlier ones do."""
    if moves_each_micro_batch(plan):  # every micro-batch keeps activations for its phase
        return plan
    batch = plan.batch
    few = batch.model_copy(update={"accumulation": min(batch.accumulation, accumulation)})
    return plan.model_copy(update={"batch": few})


def moves_each_micro_batch(plan: Plan) -> bool:
    """Whether each further micro-batch moves something, or keeps it until its phase comes back."""
    return plan.is_offloaded("parameters") or plan.is_offloaded("activations")


def _memory_class(offloaded: OffloadClass) -> MemoryClass:
    """The memory class of what a plan offloads: parameters are stored as weights."""
    return "weights" if offloaded == "parameters" else offloaded
