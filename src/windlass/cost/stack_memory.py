"""Device memory of a plan on a software stack other than Windlass's own.

No program of ours says what another stack holds at each moment, so its fullest moment is taken: a
stage has all its state, the activations of all micro-batches in flight, and what the backward pass
of its largest layer holds. What the stack itself holds comes on top (`StackMemory`).
"""

from collections.abc import Sequence

from windlass.program import (
    LayerSizes,
    chunks_of_stage,
    plan_layer_sizes,
    recompute_mode,
)
from windlass.schema import OWN_STACK, Graph, Machine, MemoryClass, PipelineSchedule, Plan

GATHERED_LAYERS = 2
"""Layers whose parameters FSDP holds whole at once: the one that runs, and the next."""


def stack_stage_bytes(
    plan: Plan, graph: Graph, machine: Machine
) -> tuple[dict[MemoryClass, float], ...]:
    """Bytes of device memory at the fullest moment of each stage, by class.

    Args:
        plan: the plan.
        graph: the graph that it partitions.
        machine: a machine that names a stack.
    """
    sizes = plan_layer_sizes(plan, graph)
    return tuple(
        _stage_bytes(plan, sizes, machine, stage) for stage in range(plan.parallel.pipeline)
    )


def _stage_bytes(
    plan: Plan, sizes: Sequence[LayerSizes], machine: Machine, stage: int
) -> dict[MemoryClass, float]:
    memory = (machine.stack or OWN_STACK).memory
    chunks = [plan.stages[chunk] for chunk in chunks_of_stage(plan, stage)]
    layers = [at for chunk in chunks for at in range(chunk.first_layer, chunk.end_layer)]
    own = [sizes[at] for at in layers]
    modes = {at: recompute_mode(plan, at) for at in layers}
    kept = sum(_kept_bytes(sizes[at], full=modes[at] == "full") for at in layers)
    running = max(
        (sizes[at].saved if modes[at] == "full" else 0) + sizes[at].backward_peak for at in layers
    )
    parallel = plan.parallel
    share = live_share(
        parallel.schedule,
        parallel.pipeline,
        parallel.virtual_stages,
        plan.batch.accumulation,
        stage,
    )
    live = share * kept
    if layers[-1] == len(sizes) - 1:
        live -= (share - 1) * sizes[-1].saved  # its backward follows at once
    by_class: dict[MemoryClass, float] = {
        "weights": _weight_bytes(plan, own),
        "gradients": _gradient_bytes(plan, own, machine),
        "optimizer": float(sum(each.optimizer for each in own)),
        "activations": live * memory.activations,
        "working": running * memory.activations,
    }
    context = memory.context_bytes
    outside = machine.device.runtime_bytes if context is None else context
    held = sum(by_class.values())
    by_class["runtime"] = outside + memory.buffer_bytes + memory.allocator_share * held
    return by_class


def _kept_bytes(sizes: LayerSizes, *, full: bool) -> float:
    """Bytes that a micro-batch leaves in a layer until its backward pass."""
    return sizes.output + (0 if full else sizes.saved)


def live_share(
    schedule: PipelineSchedule, pipeline: int, virtual_stages: int, micros: int, stage: int
) -> float:
    """Micro-batches in flight on a stage; of model chunks, their share of the stage.

    Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2.

    Args:
        schedule: the pipeline schedule.
        pipeline: number of stages.
        virtual_stages: model chunks on each stage.
        micros: micro-batches of a step.
        stage: index of the stage.
    """
    behind = pipeline - stage - 1
    if schedule == "gpipe":
        return float(micros)
    if virtual_stages == 1:
        return float(min(micros, behind + 1))
    in_flight = min(micros * virtual_stages, 2 * behind + (virtual_stages - 1) * pipeline + 1)
    return in_flight / virtual_stages


def _weight_bytes(plan: Plan, own: Sequence[LayerSizes]) -> float:
    shards = float(sum(each.weight_shard for each in own))
    if plan.sharding.parameters == 1:
        return shards
    whole = sorted((each.weights for each in own), reverse=True)
    return shards + sum(whole[:GATHERED_LAYERS] if plan.sharding.reshard else whole)


def _gradient_bytes(plan: Plan, own: Sequence[LayerSizes], machine: Machine) -> float:
    stack = machine.stack or OWN_STACK
    narrow = plan.parameter_itemsize / plan.gradient_itemsize
    share = narrow if stack.gradient_sums == "half" else 1.0
    if plan.sharding.reshard:
        shards = sum(each.gradient_shard for each in own)
        return shards + max(each.gradients for each in own) * narrow
    elements = sum(each.gradients for each in own) / plan.gradient_itemsize
    return sum(each.gradients for each in own) * share + elements * stack.memory.gradient_bytes
