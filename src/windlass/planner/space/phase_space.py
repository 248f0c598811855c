"""Phase space: plans over several devices whose layers take turns in the near tier.

Weights, gradients and optimizer state of all of them live in a tier beyond it, and outputs too
where there is no room for them nearby.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise, product

from windlass.planner.space.plan_space import PlanSpace
from windlass.planner.space.stage_partition import balanced_partition
from windlass.program.memory.offloaded_bytes import far_bytes
from windlass.schema.graph import Graph
from windlass.schema.machine import Machine, Tier
from windlass.schema.plan import DEVICE_TIER, Batch, Offload, Parallelism, Plan, ShardingDegrees, Stage

_PHASES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""How many phases of a stage are tried where the request leaves it open, and each layer alone."""


def full_parallelisms(field: PlanSpace) -> tuple[Parallelism, ...]:
    """The cuts that are open, of those only what takes most devices.

    Args:
        field: what is open.
    """
    able = [
        Parallelism(pipeline=pipeline, tensor=tensor, data=replicas)
        for pipeline, tensor, replicas in product(field.pipelines, field.tensors, field.replicas)
        if pipeline * tensor * replicas <= field.machine.devices and pipeline <= field.graph.layers
    ]
    most = max((cut.devices for cut in able), default=0)
    return tuple(cut for cut in able if cut.devices == most)


def base_plans(field: PlanSpace) -> Iterator[Plan]:
    """Every plan that is open, each stage in one piece.

    Recompute tells no two plans of a single stage apart: it runs all layers again but those of the
    last phase, whose backward passes follow at once.
    """
    if field.request.parallel.virtual_stages not in (None, 1):
        return
    for cut, precision, micros in product(full_parallelisms(field), field.precisions, field.micros):
        micro = field.micro(micros, cut.data)
        if micro is None:
            continue
        modes = [
            (compiled, mode)
            for compiled, mode in field.modes("1f1b", precision, cut.tensor)
            if mode != "selective" or field.request.recompute == mode
        ]
        if cut.pipeline == 1:
            modes = list({compiled: (compiled, mode) for compiled, mode in modes[::-1]}.values())
        for (compiled, mode), shared in product(modes, field.pairs(cut.data)):
            stages = tuple(
                Stage(phases=(bounds,), recompute=mode)
                for bounds in pairwise(field.ends(cut.pipeline))
            )
            yield field.base.model_copy(
                update={
                    "parallel": cut.model_copy(
                        update={"schedule": field.request.parallel.schedule or "1f1b"}
                    ),
                    "precision": precision,
                    "compile": compiled,
                    "sharding": ShardingDegrees(parameters=shared[0], optimizer=shared[1]),
                    "batch": Batch(sequence=field.sequence, micro=micro, accumulation=micros),
                    "stages": stages,
                }
            )


def phase_partitions(base: Plan, field: PlanSpace) -> Iterator[Plan]:
    """A plan's stages in so many phases as are open, at home nowhere yet, most phases first."""
    longest = max(stage.end_layer - stage.first_layer for stage in base.stages)
    counts = (longest, *(count for count in reversed(_PHASES) if count < longest))
    parameters = tuple(kind.parameter_count for kind in field.graph.layer_kinds())
    for count in counts if field.request.phases is None else (field.request.phases,):
        if 1 < count <= longest:
            stages = tuple(
                Stage.model_construct(
                    phases=_phases(parameters[stage.first_layer : stage.end_layer], stage.first_layer, count),
                    recompute=stage.recompute,
                    recompute_layers=stage.recompute_layers,
                )
                for stage in base.stages
            )
            yield base.model_copy(update={"stages": stages})


def offload_tiers(machine: Machine) -> tuple[Tier, ...]:
    """The tiers that something can wait in, nearest first."""
    return tuple(tier for tier in machine.device.tiers[1:] if tier.read and tier.write)


def with_state_on(plan: Plan, tier: str, *, outputs: bool) -> Plan:
    """The plan with its state at home in a tier.

    Args:
        plan: in phases.
        tier: that holds it.
        outputs: whether outputs go there too from forward to backward.
    """
    activations = tier if outputs else DEVICE_TIER
    home = Offload(parameters=tier, gradients=tier, optimizer=tier, activations=activations)
    return plan.model_copy(update={"offload": home})


def fullest_offloaded_bytes(plan: Plan, field: PlanSpace) -> int:
    """What waits beyond the near tier, on the device where it is most."""
    return max(
        sum(sum(classes.values()) for classes in far_bytes(plan, field.graph, stage).values())
        for stage in range(plan.parallel.pipeline)
    )


@lru_cache(maxsize=4096)
def _phases(parameters: tuple[int, ...], first: int, count: int) -> tuple[tuple[int, int], ...]:
    """Layers in phases the largest of which has as few parameters as can be."""
    bounds = balanced_partition(parameters, min(count, len(parameters)))
    return tuple((first + begin, first + end) for begin, end in bounds)


def offloaded_bytes(plan: Plan, graph: Graph) -> int:
    """Bytes of a plan of one device that wait in tiers beyond the near one."""
    return sum(sum(classes.values()) for classes in far_bytes(plan, graph).values())
