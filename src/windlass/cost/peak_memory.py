"""Peak memory of each tier on the device where it is fullest.

The program says which tensors are alive while each instruction runs; the machine says what the
process holds before any tensor. Fragmentation adds nothing: `torch_ext.cpu_allocator` maps blocks
one by one, so that resident memory is the memory of live tensors.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import expm1

from windlass.cost.clock.stack_bytes import stack_stage_bytes
from windlass.program import (
    MemoryProfile,
    Program,
    evaluation_bytes,
    lower_stages,
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

MEMORY_ERROR = 0.028
"""Half the width of the 80 % interval of peak memory, as a share: what a process takes beside its
tensors depends on which code it has run. It holds 32 of the 40 plans of `windlass validate here`,
seed 733 (2026-11-22)."""


def stage_tier_peaks(
    plan: Plan, graph: Graph, machine: Machine, programs: Sequence[Program] = ()
) -> tuple[tuple[TierPeak, ...], ...]:
    """The peak of each tier, device memory first, on one device of each stage.

    Args:
        programs: programs of at least one device of each stage; none means those of
            `steady_state_microbatches`, which need as much.
    """
    stack, error = machine.stack, MEMORY_ERROR
    if stack is not None and stack.memory_deviation is not None:
        error = -expm1(-DEVIATIONS_OF_80_PERCENT * stack.memory_deviation)
    # In phases every stack does the same: a layer's weights come, are used and leave again.
    if stack is not None and not plan.is_offloaded("parameters"):
        stages = stack_stage_bytes(plan, graph, machine)
        held = [{name: round(nbytes) for name, nbytes in each.items()} for each in stages]
        return tuple(
            tuple(_peaks(each, round(sum(stage.values())), error, {}, machine))
            for each, stage in zip(held, stages, strict=True)
        )
    programs = programs or stage_programs(plan, graph)
    by_stage = {mesh_coord(each.device, plan.parallel).stage: each for each in reversed(programs)}
    runtime_bytes = machine.device.process_bytes(compiled=plan.compile)
    found = []
    for stage in sorted(by_stage):
        full = memory_profile(by_stage[stage], plan, graph, runtime_bytes=runtime_bytes)
        if plan.step_graph:
            full = _beside_recording(full, plan, graph)
        offloaded = offloaded_bytes_by_tier(plan, graph, stage)
        peaks = _peaks(full.by_class, full.peak_bytes, error, offloaded, machine)
        found.append(tuple(peaks))
    return tuple(found)


def _beside_recording(full: MemoryProfile, plan: Plan, graph: Graph) -> MemoryProfile:
    """What a step holds whose memory lies in a pool of its own, which evaluations do not use."""
    beside = evaluation_bytes(plan, graph)
    in_use = tuple(nbytes + beside for nbytes in full.bytes_by_instruction)
    by_class = full.by_class | {"working": full.by_class["working"] + beside}
    return replace(full, bytes_by_instruction=in_use, by_class=by_class)


def _peaks(
    by_class: Mapping[MemoryClass, int],
    peak_bytes: int,
    error: float,
    offloaded: Mapping[str, Mapping[OffloadClass, int]],
    machine: Machine,
) -> Iterator[TierPeak]:
    """The peaks of all tiers on one device, from what the fullest moment holds."""
    memory, *others = machine.device.tiers
    yield TierPeak(
        tier=memory.name,
        capacity_bytes=memory.capacity_bytes,
        peak_bytes=peak_bytes,
        by_class=dict(by_class),
        error=error,
    )
    for tier in others:
        classes = offloaded.get(tier.name, {})
        yield TierPeak(
            tier=tier.name,
            capacity_bytes=tier.capacity_bytes,
            peak_bytes=sum(classes.values()),
            # Parameters are stored as weights.
            by_class={
                "weights" if name == "parameters" else name: nbytes
                for name, nbytes in classes.items()
            },
        )


def stage_programs(plan: Plan, graph: Graph) -> tuple[Program, ...]:
    """A program of each stage, of as few micro-batches as need as much memory as all."""
    return lower_stages(steady_state_microbatches(plan), graph)


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
