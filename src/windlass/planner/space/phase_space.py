"""Phase space: plans in which groups of layers take turns in device memory.

The weights, gradients and optimizer state of all layers are offloaded, and activations too if they
have no room on the device.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise, product

import numpy as np

from windlass.cost import Ints
from windlass.planner.space.options import offload_tiers
from windlass.planner.space.phase_table import PhaseTable, sums_before, with_chunks
from windlass.planner.space.plan_space import PlanSpace
from windlass.planner.space.stage_partition import balanced_partition
from windlass.program import (
    offloaded_bytes_by_tier,
    offloaded_layer_bytes,
    plan_layer_sizes,
    plan_state_sizes,
)
from windlass.schema import (
    DEVICE_TIER,
    Batch,
    Graph,
    Offload,
    Parallelism,
    PipelineSchedule,
    Plan,
    Recompute,
    ResolvedRequest,
    ShardingDegrees,
    Stage,
    Tier,
)

PHASES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Phases of a stage that are tried if the request leaves them open, besides one for each layer."""

MOST_SPANNING = 64
"""Micro-batches of a step in which phases span stages, unless the request names its pipeline.

Such a plan is lowered and simulated whole, which takes seconds where there are hundreds of them.
"""


def base_plans(space: PlanSpace) -> Iterator[Plan]:
    """Every plan that is open, each stage in one phase."""
    devices = space.table.devices.tolist()
    for pipeline in space.pipeline_degrees:
        for config, ranks in enumerate(devices):
            if pipeline * ranks <= space.machine.devices and pipeline <= space.graph.layers:
                yield from plans_of(space, pipeline, config)


def plans_of(space: PlanSpace, pipeline: int, config: int) -> Iterator[Plan]:
    """The plans of one configuration on so many stages, each stage in one phase.

    Recompute modes do not distinguish plans of a single stage: in phases all layers are recomputed
    except those of the last phase, whose backward passes follow at once. Of schedules there are
    two: each phase is a model chunk of its own (`interleaved`), or each stage runs all of its own
    before the next begins. Offloaded state is shared by as many replicas as offloaded parameters
    are.
    """
    table = space.table
    layer = table.modes[table.mode[config]]
    parallel = Parallelism(
        pipeline=pipeline,
        tensor=layer.tensor,
        data=int(table.data[config]),
        context=layer.context,
        expert=layer.expert,
    )
    bounds = space.chunk_bounds(pipeline)
    modes = [
        mode
        for compiled, mode in space.modes("1f1b", layer.precision, layer.tensor)
        if compiled == layer.compiled
    ]
    for schedule, mode, (parameters, optimizer) in product(
        phase_schedules(space, pipeline),
        modes[:1] if pipeline == 1 else modes,
        space.sharding_degrees(parallel.replicas, parallel.expert_degree),
    ):
        if parameters == optimizer:
            yield space.base.model_copy(
                update={
                    "parallel": parallel.model_copy(update={"schedule": schedule}),
                    "precision": layer.precision,
                    "compile": layer.compiled,
                    "loss": layer.loss,
                    "attention": layer.attention,
                    "sharding": ShardingDegrees(parameters=parameters, optimizer=optimizer),
                    "batch": Batch(
                        sequence=space.sequence,
                        micro=int(table.micro[config]),
                        accumulation=int(table.accumulation[config]),
                    ),
                    "stages": _stages(bounds, mode),
                }
            )


def phase_partitions(base: Plan, space: PlanSpace) -> Iterator[Plan]:
    """The plan in every number of phases that is open, most phases first; not offloaded yet."""
    spans_stages = base.parallel.schedule == "interleaved"
    longest = max(stage.end_layer - stage.first_layer for stage in base.stages)
    if spans_stages:
        longest = space.graph.layers // base.parallel.pipeline
    parameters = tuple(kind.parameter_count for kind in space.graph.layer_kinds())
    pin = space.request.phases
    if spans_stages and (chunks := space.request.parallel.virtual_stages) is not None:
        pin = chunks if pin in (None, chunks) else 1
    counts = (longest, *(count for count in reversed(PHASES) if count < longest))
    for count in counts if pin is None else (pin,):
        if not 1 < count <= longest:
            continue
        if spans_stages:
            phases = _phases(parameters, 0, count * base.parallel.pipeline)
            mode = base.stages[0].recompute
            stages = tuple(Stage.model_construct(phases=(each,), recompute=mode) for each in phases)
        else:
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
        yield with_chunks(base, stages)


def with_state_on(plan: Plan, tier: str, *, activations: bool) -> Plan:
    """The plan with its state offloaded to a tier.

    Args:
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
    sizes = plan_layer_sizes(plan, graph)
    return max(
        sum(
            sum(classes.values())
            for classes in offloaded_bytes_by_tier(plan, graph, stage, sizes).values()
        )
        for stage in range(plan.parallel.pipeline)
    )


class OffloadedState:
    """Bytes that plans in phases keep in an offload tier.

    Weights, gradients and optimizer state are counted once for all plans that differ in
    micro-batch, compilation, recompute, loss or attention: those change activations only.

    Args:
        space: what is open.
    """

    def __init__(self, space: PlanSpace) -> None:
        self._space, self._tiers = space, offload_tiers(space.machine)
        self._known: dict[tuple[object, ...], tuple[Ints, Ints]] = {}
        self._tables: dict[tuple[object, ...], PhaseTable | None] = {}
        self._has_room: dict[tuple[object, ...], bool] = {}

    def table(self, base: Plan) -> PhaseTable | None:
        """The plan in every number of phases that is open, most phases first; None if in none."""
        key = base.parallel.pipeline, base.parallel.schedule, base.stages[0].recompute
        if key not in self._tables:
            stages = [plan.stages for plan in phase_partitions(base, self._space)]
            offloaded = with_state_on(base, self._tiers[0].name, activations=False)
            self._tables[key] = (
                PhaseTable.of(offloaded, stages, self._space.graph) if stages else None
            )
        return self._tables[key]

    def table_with_room(self, base: Plan) -> PhaseTable | None:
        """As `table`; None too if no tier has room for the state in any number of phases.

        Such plans fit nowhere: activations that are offloaded come on top.
        """
        parallel = base.parallel
        table, key = self.table(base), (
            *state_key(base), parallel.schedule, base.stages[0].recompute
        )  # fmt: skip
        if table is not None and key not in self._has_room:
            self._has_room[key] = any(
                (self.fullest_bytes(base, table, tier) <= tier.capacity_bytes).any()
                for tier in self._tiers
            )
        return table if table is not None and self._has_room[key] else None

    def fullest_bytes(
        self, base: Plan, table: PhaseTable, tier: Tier, outputs: Ints | None = None
    ) -> Ints:
        """Offloaded bytes on the device that offloads most, `[plan]`.

        Args:
            outputs: bytes of activations that are offloaded there too, `[phase]`; None leaves
                them in device memory.
        """
        state, waiting = (sums[table.end] - sums[table.begin] for sums in self._before(base, tier))
        held = state + np.where(table.stays, 0, waiting)
        if outputs is not None:
            held += outputs
        return np.asarray(table.by_device(held).max(axis=1), dtype=np.int64)

    def _before(self, plan: Plan, tier: Tier) -> tuple[Ints, Ints]:
        """Bytes of state, and of gradients that wait for their update, of all layers before each.

        Layers of a stage's first phase, which stays in device memory, are updated at once.
        """
        key = (*state_key(plan), tier.name)
        if key not in self._known:
            plan, graph = with_state_on(plan, tier.name, activations=False), self._space.graph
            sizes = plan_state_sizes(plan, graph)
            known = {layer: offloaded_layer_bytes(plan, graph, layer) for layer in set(sizes)}
            state, gradients = sums_before(np.array([known[layer] for layer in sizes]).T)
            self._known[key] = state, gradients if plan.defers_updates else 0 * gradients
        return self._known[key]


def state_key(plan: Plan) -> tuple[object, ...]:
    """What the model state of a plan depends on, beside its phases."""
    parallel = plan.parallel
    return (
        parallel.pipeline, parallel.tensor, parallel.data, parallel.context, parallel.expert,
        plan.precision, plan.sharding,
        plan.batch.accumulation > 1,  # accumulated gradients are float32
    )  # fmt: skip


def passes_key(base: Plan) -> tuple[object, ...]:
    """What the passes of a micro-batch depend on."""
    parallel = base.parallel
    return (
        parallel.tensor, parallel.context, parallel.expert, base.precision, base.compile,
        base.loss, base.attention, base.stages[0].recompute, base.batch.micro,
    )  # fmt: skip


def names_pipeline(request: ResolvedRequest) -> bool:
    """Whether a request names how many stages or model chunks there are, or that they alternate."""
    pins = request.parallel
    named = pins.pipeline, pins.virtual_stages
    return named != (None, None) or pins.schedule == "interleaved"


def phase_schedules(space: PlanSpace, pipeline: int) -> tuple[PipelineSchedule, ...]:
    """The orders in which the stages of a pipeline may run their phases."""
    pins = space.request.parallel
    named: tuple[PipelineSchedule, ...] = ("interleaved", "1f1b")
    if pins.schedule is not None:
        named = (pins.schedule,)
    return tuple(
        schedule
        for schedule in named
        if (
            pipeline > 1 and pins.virtual_stages != 1
            if schedule == "interleaved"
            else pins.virtual_stages in (None, 1)
        )
    )


@lru_cache(maxsize=4096)
def _stages(bounds: tuple[int, ...], mode: Recompute) -> tuple[Stage, ...]:
    """Stages of one phase each."""
    return tuple(Stage(phases=(each,), recompute=mode) for each in pairwise(bounds))


@lru_cache(maxsize=4096)
def _phases(parameters: tuple[int, ...], first: int, count: int) -> tuple[tuple[int, int], ...]:
    """Layers in phases whose largest has as few parameters as possible."""
    bounds = balanced_partition(parameters, min(count, len(parameters)))
    return tuple((first + begin, first + end) for begin, end in bounds)
