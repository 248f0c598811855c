"""Peak memory of each tier on the device where it is fullest.

The program says which tensors are alive while each instruction runs; the machine says what the
process holds before any tensor. Fragmentation adds nothing: `torch_ext.cpu_allocator` maps blocks
one by one, so that resident memory is the memory of live tensors.
"""

from collections.abc import Iterator, Mapping
from math import expm1

from windlass.cost.clock.stack_bytes import stack_stage_bytes
from windlass.program import Program, memory_profile, mesh_coord, offloaded_bytes_by_tier
from windlass.schema import (
    DEVIATIONS_OF_80_PERCENT,
    Graph,
    Machine,
    MemoryClass,
    OffloadClass,
    Plan,
    TierPeak,
)

_MEMORY_ERROR = 0.02
"""Half the width of the 80 % interval of peak memory, as a share: what a process takes beside its
tensors depends on which code it has run. Measured by `windlass validate here`."""


def tier_peaks(
    plan: Plan, graph: Graph, machine: Machine, programs: tuple[Program, ...]
) -> tuple[TierPeak, ...]:
    """The peak of each tier on the device where it is highest, device memory first."""
    stages = stage_tier_peaks(plan, graph, machine, programs)
    return tuple(
        max((tiers[index] for tiers in stages), key=lambda peak: peak.peak_bytes)
        for index in range(len(machine.device.tiers))
    )


def stage_tier_peaks(
    plan: Plan, graph: Graph, machine: Machine, programs: tuple[Program, ...]
) -> tuple[tuple[TierPeak, ...], ...]:
    """The peak of each tier, device memory first, on one device of each stage.

    Args:
        plan: the plan.
        graph: the graph that it partitions.
        machine: the machine that it runs on.
        programs: programs of at least one device of each stage.
    """
    if machine.stack is not None:
        stages = stack_stage_bytes(plan, graph, machine)
        return tuple(tuple(_on_stack(each, machine)) for each in stages)
    process_bytes = machine.device.process_bytes(compiled=plan.compile)
    by_stage = {mesh_coord(each.device, plan.parallel).stage: each for each in reversed(programs)}
    return tuple(
        tuple(_stage(by_stage[stage], plan, graph, machine, process_bytes, stage))
        for stage in sorted(by_stage)
    )


def _stage(
    program: Program, plan: Plan, graph: Graph, machine: Machine, process_bytes: int, stage: int
) -> Iterator[TierPeak]:
    device_memory, *others = machine.device.tiers
    full = memory_profile(program, plan, graph, runtime_bytes=process_bytes)
    yield TierPeak(
        tier=device_memory.name,
        capacity_bytes=device_memory.capacity_bytes,
        peak_bytes=full.peak_bytes,
        by_class=full.by_class,
        instruction=full.peak_instruction,
        error=_MEMORY_ERROR,
    )
    offloaded = offloaded_bytes_by_tier(plan, graph, stage)
    for tier in others:
        by_class = offloaded.get(tier.name, {})
        yield TierPeak(
            tier=tier.name,
            capacity_bytes=tier.capacity_bytes,
            peak_bytes=sum(by_class.values()),
            by_class={_memory_class(name): nbytes for name, nbytes in by_class.items()},
            instruction=0,
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
        instruction=0,
        error=_MEMORY_ERROR if deviation is None else -expm1(-DEVIATIONS_OF_80_PERCENT * deviation),
    )
    for tier in others:
        yield TierPeak(
            tier=tier.name, capacity_bytes=tier.capacity_bytes, peak_bytes=0, by_class={},
            instruction=0,
        )  # fmt: skip


def _memory_class(offloaded: OffloadClass) -> MemoryClass:
    """The memory class of what a plan offloads: parameters are stored as weights."""
    return "weights" if offloaded == "parameters" else offloaded
