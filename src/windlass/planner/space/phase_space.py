"""Phase space: plans in which groups of layers take turns in device memory.

The weights, gradients and optimizer state of all layers are offloaded, and activations too if they
have no room on the device.
"""

from collections.abc import Iterator
from functools import cache, lru_cache
from itertools import pairwise, product

from windlass.planner.space.options import offload_tiers
from windlass.planner.space.pins import pinned_parallelism
from windlass.planner.space.plan_space import PlanSpace
from windlass.planner.space.stage_partition import balanced_partition
from windlass.program import (
    LayerSizes,
    offloaded_bytes_by_tier,
    offloaded_output_bytes,
    plan_layer_sizes,
)
from windlass.schema import (
    DEVICE_TIER,
    Batch,
    Graph,
    Offload,
    Parallelism,
    Plan,
    Recompute,
    ShardingDegrees,
    Stage,
    Tier,
)

_PHASES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Phases of a stage that are tried if the request leaves them open, besides one for each layer."""


def full_parallelisms(space: PlanSpace) -> tuple[Parallelism, ...]:
    """Parallel degrees that are open; only those that use the most devices.

    Args:
        space: what is open. If every grid is, those count that use the most devices for their
            tensor-parallel degree: a larger degree on fewer devices may need less memory.
    """
    context = pinned_parallelism(space.request).context
    candidates = [
        Parallelism(pipeline=pipeline, tensor=tensor, data=data, context=context, expert=expert)
        for pipeline, tensor, data, expert in product(
            space.pipeline_degrees, space.tensor_degrees, space.data_degrees, space.expert_degrees
        )
        if pipeline * tensor * data * (context or 1) <= space.machine.devices
        and pipeline <= space.graph.layers
        and space.divides_experts(expert, data, context)
    ]
    most: dict[int | None, int] = {}
    groups = [each.tensor if space.every_grid else None for each in candidates]
    for group, each in zip(groups, candidates, strict=True):
        most[group] = max(most.get(group, 0), each.devices)
    pairs = zip(groups, candidates, strict=True)
    return tuple(each for group, each in pairs if each.devices == most[group])


def base_plans(space: PlanSpace) -> Iterator[Plan]:
    """Every plan that is open, each stage in one phase.

    Recompute modes do not distinguish plans of a single stage: in phases all layers are recomputed
    except those of the last phase, whose backward passes follow at once.
    """
    if space.request.parallel.virtual_stages not in (None, 1):
        return

    @cache
    def stages_of(pipeline: int, mode: Recompute) -> tuple[Stage, ...]:
        bounds = pairwise(space.chunk_bounds(pipeline))
        return tuple(Stage(phases=(each,), recompute=mode) for each in bounds)

    schedule = space.request.parallel.schedule or "1f1b"
    choices = product(full_parallelisms(space), space.precisions, space.losses, space.attentions)
    for parallel, precision, loss, attention in choices:
        if loss == "fused" and parallel.tensor > 1:
            continue
        modes = [
            (compiled, mode)
            for compiled, mode in space.modes("1f1b", precision, parallel.tensor)
            if mode != "selective" or space.request.recompute == mode
        ]
        if parallel.pipeline == 1:
            modes = list({compiled: (compiled, mode) for compiled, mode in modes[::-1]}.values())
        for (micro, micros), (compiled, mode), degrees in product(
            reversed(space.microbatches(parallel.data)),
            modes,
            space.sharding_degrees(parallel.replicas, parallel.expert_degree),
        ):
            yield space.base.model_copy(
                update={
                    "parallel": parallel.model_copy(update={"schedule": schedule}),
                    "precision": precision,
                    "compile": compiled,
                    "loss": loss,
                    "attention": attention,
                    "sharding": ShardingDegrees(parameters=degrees[0], optimizer=degrees[1]),
                    "batch": Batch(sequence=space.sequence, micro=micro, accumulation=micros),
                    "stages": stages_of(parallel.pipeline, mode),
                }
            )


def phase_partitions(base: Plan, space: PlanSpace) -> Iterator[Plan]:
    """The plan in every number of phases that is open, most phases first; not offloaded yet."""
    longest = max(stage.end_layer - stage.first_layer for stage in base.stages)
    counts = (longest, *(count for count in reversed(_PHASES) if count < longest))
    parameters = tuple(kind.parameter_count for kind in space.graph.layer_kinds())
    for count in counts if space.request.phases is None else (space.request.phases,):
        if 1 < count <= longest:
            stages = tuple(
                Stage.model_construct(
                    phases=_phases(
                        parameters[stage.first_layer : stage.end_layer], stage.first_layer, count
                    ),
                    recompute=stage.recompute,
                    recompute_layers=stage.recompute_layers,
                )
                for stage in base.stages
            )
            yield base.model_copy(update={"stages": stages})


def with_state_on(plan: Plan, tier: str, *, activations: bool) -> Plan:
    """The plan with its state offloaded to a tier.

    Args:
        plan: a plan in phases.
        tier: name of the tier.
        activations: whether activations are offloaded too between forward and backward.
    """
    offload = Offload(
        parameters=tier,
        gradients=tier,
        optimizer=tier,
        activations=tier if activations else DEVICE_TIER,
    )
    return plan.model_copy(update={"offload": offload})


def fullest_offloaded_bytes(plan: Plan, graph: Graph) -> int:
    """Offloaded bytes on the device that offloads most."""
    return max(_offloaded_bytes(plan, graph))


def _offloaded_bytes(plan: Plan, graph: Graph) -> tuple[int, ...]:
    """Offloaded bytes on a device of each stage, `[stage]`."""
    sizes = plan_layer_sizes(plan, graph)
    return tuple(
        sum(
            sum(classes.values())
            for classes in offloaded_bytes_by_tier(plan, graph, stage, sizes).values()
        )
        for stage in range(plan.parallel.pipeline)
    )


class OffloadedState:
    """Bytes of weights, gradients and optimizer state of plans in phases, in an offload tier.

    They are counted once for all plans that differ in micro-batch, compilation, recompute, loss or
    attention: those change activations only.

    Args:
        space: what is open.
    """

    def __init__(self, space: PlanSpace) -> None:
        self._space, self._tiers = space, offload_tiers(space.machine)
        self._known: dict[tuple[object, ...], tuple[int, ...]] = {}
        self._too_large: set[tuple[object, ...]] = set()
        """What plans have in common that no tier holds in any number of phases."""

    def partitions(self, base: Plan) -> list[Plan]:
        """As `phase_partitions`, without those whose state no tier has room for.

        They fit nowhere: activations that are offloaded come on top.
        """
        if self._key(base) in self._too_large:
            return []
        found = [plan for plan in phase_partitions(base, self._space) if self._has_room(plan)]
        if not found:
            self._too_large.add(self._key(base))
        return found

    def fullest_bytes(
        self, plan: Plan, tier: Tier, sizes: tuple[LayerSizes, ...] | None = None
    ) -> int:
        """Offloaded bytes on the device that offloads most.

        Args:
            plan: a plan in phases.
            tier: the tier of its state.
            sizes: sizes of its layers, if activations are offloaded there too; None leaves them in
                device memory.
        """
        state = self._stage_bytes(plan, tier)
        if sizes is None:
            return max(state)
        offloaded = with_state_on(plan, tier.name, activations=True)
        return max(
            nbytes + offloaded_output_bytes(offloaded, self._space.graph, stage, sizes)
            for stage, nbytes in enumerate(state)
        )

    def _stage_bytes(self, plan: Plan, tier: Tier) -> tuple[int, ...]:
        """Bytes on a device of each stage, with all activations in device memory, `[stage]`."""
        key = (*self._key(plan), tier.name, *(stage.phases for stage in plan.stages))
        if key not in self._known:
            offloaded = with_state_on(plan, tier.name, activations=False)
            self._known[key] = _offloaded_bytes(offloaded, self._space.graph)
        return self._known[key]

    def _has_room(self, plan: Plan) -> bool:
        return any(self.fullest_bytes(plan, tier) <= tier.capacity_bytes for tier in self._tiers)

    def _key(self, plan: Plan) -> tuple[object, ...]:
        """What the state of a plan depends on, beside its phases."""
        # Gradients that are accumulated are float32.
        return plan.parallel, plan.precision, plan.sharding, plan.batch.accumulation > 1


@lru_cache(maxsize=4096)
def _phases(parameters: tuple[int, ...], first: int, count: int) -> tuple[tuple[int, int], ...]:
    """Layers in phases whose largest has as few parameters as possible."""
    bounds = balanced_partition(parameters, min(count, len(parameters)))
    return tuple((first + begin, first + end) for begin, end in bounds)
