"""Plan space: all plans over several devices that a request leaves open, as tables of indices.

Plans of one pipeline shape (schedule, stages, virtual stages, micro-batches) form a batch, because
the batched cost model evaluates them together. No `Plan` is built until it has won.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise, product
from typing import get_args

import numpy as np

from windlass.cost.arrays import Bools, Ints
from windlass.cost.batched.config_keys import RecomputeConfig, ShardingOption
from windlass.cost.batched.plan_table import PlanTable
from windlass.cost.batched.schedule_index import PipelineShape
from windlass.cost.batched.sharding_table import ShardingTable
from windlass.planner.space.config_table import ConfigFamily, ConfigTable, sharding_options
from windlass.planner.space.options import (
    divisors,
    is_captured,
    open_tensor_degrees,
    precisions,
    sequence_of,
)
from windlass.planner.space.options import open_recompute as recomputes_of
from windlass.planner.space.stage_partition import stage_partition
from windlass.program.activation_checkpointing import with_recompute
from windlass.program.validate_plan import (
    schedule_errors,
    selective_recompute_errors,
    tensor_parallel_errors,
)
from windlass.schema.graph import Graph, Precision
from windlass.schema.machine import Machine
from windlass.schema.plan import (
    DEVICE_TIER,
    Batch,
    Offload,
    Parallelism,
    PipelineSchedule,
    Plan,
    Recompute,
    ShardingDegrees,
    Stage,
)
from windlass.schema.request import Request

_SCHEDULES: tuple[PipelineSchedule, ...] = ("1f1b", "gpipe", "zero-bubble", "interleaved")
_VIRTUAL_STAGES = (2, 3, 4, 6, 8, 12)
"""Virtual stages that are tried for any number of blocks."""

_MAX_VIRTUAL_STAGES = 24
"""Most virtual stages of a stage: with more, messages took longer than the bubble they saved."""


@dataclass(frozen=True, slots=True)
class PlanBatch:
    """Plans of one pipeline shape on one machine."""

    shape: PipelineShape
    chunk_bounds: tuple[int, ...]
    """First layer of each model chunk, and the number of layers."""
    table: PlanTable


CompileAndRecompute = tuple[bool, Recompute]
"""Whether layers are compiled, and how they are recomputed."""

_RECOMPUTE_MODES: tuple[Recompute, ...] = get_args(Recompute)


@dataclass(frozen=True)
class PlanSpace:
    """All plans that a request leaves open.

    Args:
        request: pins whatever it names; the rest is open.
        graph: captured from the request's model, sharded for the tensor-parallel degrees that are
            open.
        machine: the machine of the plans.
    """

    request: Request
    graph: Graph
    machine: Machine

    @cached_property
    def sequence(self) -> int:
        """Tokens of one sequence."""
        return sequence_of(self.request, self.graph)

    @property
    def minimizes_recompute(self) -> bool:
        """Whether only as many layers are recomputed as a plan needs to fit."""
        return self.request.recompute is None and self.request.recompute_layers is None

    @cached_property
    def tensor_degrees(self) -> tuple[int, ...]:
        """Tensor-parallel degrees by which layers and tokens can be sharded."""
        pin, captured = self.request.parallel.tensor, self.graph.tensor_shards
        wanted = open_tensor_degrees(self.request, self.machine, self.graph.unshardable)
        open_ = (each for each in wanted if each in captured)
        candidates = (1, *open_) if pin is None else (pin,)
        return tuple(
            degree
            for degree in candidates
            if degree <= self.machine.devices
            and not any(tensor_parallel_errors(degree, self.sequence, self.graph))
        )

    @cached_property
    def pipeline_degrees(self) -> tuple[int, ...]:
        """Pipeline-parallel degrees that divide the devices or the blocks evenly."""
        pin = self.request.parallel.pipeline
        if isinstance(self.request.recompute_layers, tuple):
            pin = pin or len(self.request.recompute_layers)
        if pin is not None:
            return (pin,)
        most = min(self.machine.devices, self.graph.layers)
        blocks = max(span.count for span in self.graph.layer_runs)
        return tuple(
            count
            for count in range(1, most + 1)
            if self.machine.devices % count == 0 or blocks % count == 0
        )

    @cached_property
    def data_degrees(self) -> tuple[int, ...]:
        """Data-parallel degrees that divide the batch evenly."""
        pin = self.request.parallel.data
        batch = self.request.train.batch
        return tuple(
            count
            for count in (divisors(batch) if pin is None else (pin,))
            if count <= self.machine.devices and batch % count == 0
        )

    def batches(self) -> Iterator[PlanBatch]:
        """All plans, shape by shape."""
        for shape, able in self.open_shapes():
            yield self.batch_of(shape, able)

    def open_shapes(self) -> Iterator[tuple[PipelineShape, Ints]]:
        """All shapes that have plans, each with the indices of its layer configurations."""
        for shape in self.shapes():
            able = self.legal_configs(shape)
            if able.size:
                yield shape, able

    def shapes(self) -> Iterator[PipelineShape]:
        """All legal shapes, each of which has plans with some numbers of micro-batches."""
        return iter(self._microbatches_of)

    @cached_property
    def _microbatches_of(self) -> Mapping[PipelineShape, tuple[int, ...]]:
        """All legal shapes, each with its numbers of micro-batches."""
        shapes: dict[PipelineShape, tuple[int, ...]] = {}
        schedules = (
            (each, *way) for each in self.pipeline_degrees for way in self._open_schedules(each)
        )
        for pipeline, order, chunks in schedules:
            if chunks * pipeline > self.graph.layers or (pipeline == 1 and order != "1f1b"):
                continue
            for micros in self.accumulations:
                if self._is_legal(order, pipeline, chunks, micros):
                    shape = PipelineShape.of(order, pipeline, chunks, micros)
                    shapes[shape] = (*shapes.get(shape, ()), micros)
        return shapes

    def config_table(self, shape: PipelineShape) -> ConfigTable:
        """The table that a shape's layer configurations are indices of; many shapes share one."""
        accumulates, pipelined = shape.microbatches > 1, shape.pipeline > 1
        if (accumulates, pipelined) not in self._config_tables:
            self._config_tables[accumulates, pipelined] = ConfigTable.of(
                self._families,
                self._sharding_table(sums=accumulates),
                batch=self.request.train.batch,
                micro=self.request.batch.micro,
                sums=accumulates,
                parted=pipelined,
            )
        return self._config_tables[accumulates, pipelined]

    def legal_configs(self, shape: PipelineShape) -> Ints:
        """Indices of the layer configurations of a shape's plans."""
        if shape not in self._legal_config_cache:
            self._legal_config_cache[shape] = self._find_legal_configs(shape)
        return self._legal_config_cache[shape]

    @cached_property
    def _legal_config_cache(self) -> dict[PipelineShape, Ints]:
        return {}

    def _find_legal_configs(self, shape: PipelineShape) -> Ints:
        table = self.config_table(shape)
        counts = np.zeros(self.request.train.batch + 1, dtype=bool)
        counts[list(self._microbatches_of[shape])] = True
        fits = table.devices * shape.pipeline <= self.machine.devices
        has_mode = np.any(self._recompute_options(shape.schedule, table)[:, table.mode], axis=0)
        return np.flatnonzero(fits & counts[table.microbatches] & has_mode)

    def batch_of(self, shape: PipelineShape, chosen: Ints) -> PlanBatch:
        """All plans of a shape with some layer configurations, given by their indices."""
        table = self.config_table(shape)
        recomputable = self._recompute_options(shape.schedule, table)[:, table.mode[chosen]]
        recompute, position = np.nonzero(recomputable)
        config = chosen[position]
        configs = np.stack(
            [table.options[config], config, recompute, table.microbatches[config]], axis=1
        )
        layers = self.request.recompute_layers or self.graph.layers
        counts = layers if isinstance(layers, tuple) else (layers,) * shape.pipeline
        recomputes = (
            RecomputeConfig(),
            RecomputeConfig(selective=counts),
            RecomputeConfig(full=counts),
        )
        plans = PlanTable.crossed(table.layer_configs, recomputes, table.sharding_table, configs)
        return PlanBatch(shape, self.chunk_bounds(shape.chunks), plans)

    def count(self, shape: PipelineShape, chosen: Ints) -> int:
        """How many plans of a shape have these layer configurations."""
        table = self.config_table(shape)
        options = self._recompute_options(shape.schedule, table).sum(axis=0)[table.mode[chosen]]
        return int((options * table.sharding_table.counts[table.options[chosen]]).sum())

    def _recompute_options(self, order: PipelineSchedule, table: ConfigTable) -> Bools:
        """Whether layers can be recomputed so under a schedule, `[recompute mode, config mode]`."""
        if (order, table) not in self._recompute_option_cache:
            options = np.zeros((len(_RECOMPUTE_MODES), len(table.modes)), dtype=bool)
            for index, (tensor, precision, compiled) in enumerate(table.modes):
                for is_compiled, recompute in self.modes(order, precision, tensor):
                    options[_RECOMPUTE_MODES.index(recompute), index] |= is_compiled == compiled
            self._recompute_option_cache[order, table] = options
        return self._recompute_option_cache[order, table]

    @cached_property
    def _recompute_option_cache(self) -> dict[tuple[PipelineSchedule, ConfigTable], Bools]:
        return {}

    @cached_property
    def _config_tables(self) -> dict[tuple[bool, bool], ConfigTable]:
        return {}

    @cached_property
    def _families(self) -> tuple[ConfigFamily, ...]:
        """All combinations of tensor and data degrees, precision and sharding of state."""
        pins = self.request.sharding
        return tuple(
            ConfigFamily(tensor, replicas, precision, moves, shares)
            for tensor, replicas, precision in product(
                self.tensor_degrees, self.data_degrees, self.precisions
            )
            for homes, moves in self.optimizer_tiers(precision)
            if (shares := _sharding_options(replicas, homes, pins.parameters, pins.optimizer))
        )

    def _sharding_table(self, *, sums: bool) -> ShardingTable:
        if sums not in self._sharding_tables:
            entries = tuple(sharding_options(family, sums=sums) for family in self._families)
            self._sharding_tables[sums] = ShardingTable(entries)
        return self._sharding_tables[sums]

    @cached_property
    def _sharding_tables(self) -> dict[bool, ShardingTable]:
        return {}

    @cached_property
    def precisions(self) -> tuple[Precision, ...]:
        """Precisions that the machine supports and that the graph was captured in."""
        pin = self.request.precision
        return precisions(self.machine) if pin is None else (pin,)

    def microbatch_size(self, micros: int, replicas: int) -> int | None:
        """Sequences of a micro-batch; None if the batch is not divisible, or the pin differs."""
        micro, rest = divmod(self.request.train.batch, replicas * micros)
        pin = self.request.batch.micro
        return None if rest or pin not in (None, micro) else micro

    def sharding_degrees(self, replicas: int) -> tuple[tuple[int, int], ...]:
        """Sharding degrees of parameters and optimizer state among this many replicas."""
        pins = self.request.sharding
        return _sharding_pairs(replicas, pins.parameters, pins.optimizer)

    def optimizer_tiers(self, precision: Precision) -> tuple[tuple[tuple[str, ...], bool], ...]:
        """Tiers for optimizer state, weights staying on the device, by whether moves need units.

        Each item is some tiers, and whether they reserve compute units for transfers: layers then
        take longer.
        """
        pin, device = self.request.offload.optimizer, self.machine.device
        offload_tiers = tuple(tier.name for tier in device.tiers[1:] if tier.read and tier.write)
        allowed = (DEVICE_TIER, *(offload_tiers if precision != "float64" else ()))
        allowed = allowed if pin is None else tuple(tier for tier in allowed if tier == pin)
        if not device.moving_share:
            return ((allowed, False),) if allowed else ()
        by_place = (
            tuple(tier for tier in allowed if (tier == DEVICE_TIER) is on_device)
            for on_device in (True, False)
        )
        return tuple((tiers, DEVICE_TIER not in tiers) for tiers in by_place if tiers)

    def chunk_bounds(self, chunks: int) -> tuple[int, ...]:
        """First layer of each model chunk, and the number of layers."""
        bounds = stage_partition(self.graph, chunks, self.sequence)
        return (*(first for first, _ in bounds), self.graph.layers)

    def plan(self, cell: PlanBatch, index: int) -> Plan:
        """The plan at one index of a batch."""
        table, shape = cell.table, cell.shape
        config, option = (
            table.config_of(table.config[index]),
            table.sharding_of(table.sharding[index]),
        )
        layer = config.layer
        plan = self.base.model_copy(
            update={
                "precision": layer.precision,
                "compile": layer.compiled,
                "parallel": Parallelism(
                    pipeline=shape.pipeline,
                    tensor=layer.tensor,
                    data=layer.replicas,
                    schedule=shape.schedule,
                    virtual_stages=shape.virtual_stages,
                ),
                "sharding": ShardingDegrees(
                    parameters=option.parameters, optimizer=option.optimizer
                ),
                "offload": Offload(optimizer=option.optimizer_tier),
                "batch": Batch(
                    sequence=self.sequence, micro=layer.micro, accumulation=config.microbatches
                ),
                "stages": tuple(Stage(phases=(bounds,)) for bounds in pairwise(cell.chunk_bounds)),
            }
        )
        return _with_recompute_config(plan, config.recompute, shape)

    @cached_property
    def base(self) -> Plan:
        """A plan with everything that the request pins for all plans."""
        return Plan(
            graph=self.graph.label,
            machine=self.machine.label,
            moments=self.request.moments,
            clip=self.request.train.clip is not None,
            batch=Batch(sequence=self.sequence, micro=1),
            stages=(Stage(phases=((0, self.graph.layers),)),),
        )

    @cached_property
    def _schedule_compiles(self) -> dict[PipelineSchedule, bool]:
        """Whether compiled layers can run under each schedule."""
        compiled = self.base.model_copy(update={"compile": True})
        return {
            order: not any(
                schedule_errors(
                    compiled.model_copy(update={"parallel": Parallelism(schedule=order)})
                )
            )
            for order in ("1f1b", "gpipe", "zero-bubble")
        } | {"interleaved": True}

    def _open_schedules(self, pipeline: int) -> Iterator[tuple[PipelineSchedule, int]]:
        """Schedules of this many stages, each with a number of virtual stages."""
        order, chunks = self.request.parallel.schedule, self.request.parallel.virtual_stages
        for each in _SCHEDULES if order is None else (order,):
            if each != "interleaved":
                if chunks in (None, 1):
                    yield each, 1
            elif chunks is None:
                yield from ((each, count) for count in self._open_virtual_stages(pipeline))
            elif chunks > 1:
                yield each, chunks

    def _open_virtual_stages(self, pipeline: int) -> tuple[int, ...]:
        """Numbers of virtual stages: a few fixed ones, and all that divide a stage's blocks."""
        blocks, rest = divmod(max(span.count for span in self.graph.layer_runs), pipeline)
        even = () if rest else divisors(blocks)[1:]
        return tuple(
            sorted({*_VIRTUAL_STAGES, *(count for count in even if count <= _MAX_VIRTUAL_STAGES)})
        )

    @cached_property
    def accumulations(self) -> tuple[int, ...]:
        """Numbers of micro-batches of a step that some number of replicas allows."""
        pin, batch = self.request.batch.accumulation, self.request.train.batch
        counts = {each for count in self.data_degrees for each in divisors(batch // count)}
        return tuple(sorted(counts if pin is None else counts & {pin}))

    def _is_legal(self, order: PipelineSchedule, pipeline: int, chunks: int, micros: int) -> bool:
        plan = self.base.model_copy(
            update={
                "parallel": Parallelism.model_construct(
                    pipeline=pipeline, tensor=1, data=1, schedule=order, virtual_stages=chunks
                ),
                "batch": Batch.model_construct(
                    sequence=self.sequence, micro=1, accumulation=micros
                ),
            }
        )
        return not any(schedule_errors(plan))

    def modes(
        self, order: PipelineSchedule, precision: Precision, tensor: int
    ) -> tuple[CompileAndRecompute, ...]:
        """Compiled or not, and how layers are recomputed."""
        key = order, precision, tensor
        if key not in self._mode_cache:
            self._mode_cache[key] = tuple(self._find_modes(*key))
        return self._mode_cache[key]

    @cached_property
    def _mode_cache(
        self,
    ) -> dict[tuple[PipelineSchedule, Precision, int], tuple[CompileAndRecompute, ...]]:
        return {}

    def _find_modes(
        self, order: PipelineSchedule, precision: Precision, tensor: int
    ) -> Iterator[CompileAndRecompute]:
        recomputes = _RECOMPUTE_MODES if self.minimizes_recompute else recomputes_of(self.request)
        for compiled, recompute in product(self._compile_modes(order, precision), recomputes):
            if recompute != "selective" or self.allows_selective(order, tensor, compiled=compiled):
                yield compiled, recompute

    def allows_selective(self, order: PipelineSchedule, tensor: int, *, compiled: bool) -> bool:
        """Whether layers can recompute selectively: keep the outputs of large products only."""
        changes = {"compile": compiled, "parallel": Parallelism(tensor=tensor, schedule=order)}
        return not any(selective_recompute_errors(self.base.model_copy(update=changes), self.graph))

    def _compile_modes(self, order: PipelineSchedule, precision: Precision) -> tuple[bool, ...]:
        """Compiled or not."""
        mode = self.request.compile
        return tuple(
            compiled
            for compiled in ((False, True) if mode is None else (mode,))
            if is_captured(self.graph, precision, compiled=compiled)
            and (not compiled or self._schedule_compiles[order])
        )


def _with_recompute_config(plan: Plan, again: RecomputeConfig, shape: PipelineShape) -> Plan:
    if again.mode == "none":
        return plan
    none = (0,) * shape.pipeline
    full, selective = (each or none for each in again)
    return with_recompute(plan, full * shape.virtual_stages, selective * shape.virtual_stages)


@lru_cache(maxsize=4096)
def _sharding_pairs(
    replicas: int, weights: int | None, optimizer: int | None
) -> tuple[tuple[int, int], ...]:
    return tuple(
        (one, other)
        for other in divisors(replicas)
        for one in divisors(other)
        if weights in (None, one) and optimizer in (None, other)
    )


@lru_cache(maxsize=4096)
def _sharding_options(
    replicas: int, homes: tuple[str, ...], weights: int | None, optimizer: int | None
) -> tuple[ShardingOption, ...]:
    pairs = _sharding_pairs(replicas, weights, optimizer)
    return tuple(ShardingOption(*pair, home) for home in homes for pair in pairs)
